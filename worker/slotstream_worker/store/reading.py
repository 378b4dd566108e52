"""The connection that streams are read on: an answer to XREAD is taken apart as it stands.

A parser that knows nothing of what comes makes five objects of every entry. Here it is known what
nearly all of them look like, so that each is only compared with the one before it, and a whole run
of them is copied at once. Anything else that an entry may hold is read field by field.

The form is that of RESP2, the protocol that Redis has spoken since 1.2:

    *<streams>   *2 $<n> <key> *<entries>   *2 $<n> <id> *2 $5 frame $<n> <frame>
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import redis

from slotstream.arguments import Arg
from slotstream.lines import NOTHING, Line
from slotstream_worker.store.runs import Raw, Read, Run

_BUFFER = 2**20
_ENTRY, _FRAME = b"*2\r\n$", b"\r\n*2\r\n$5\r\nframe\r\n$"
_LONGEST_NUMBER = 20
_MISSING = -1
_FEW = 3


class _Incomplete(Exception):
    """The rest has not come yet."""


class _Span(NamedTuple):
    """Entries alike that lie one after another from `start` on, each of `stride` bytes.

    In each, the id begins at `named`, the frame of `size` bytes at `head`.
    """

    start: int
    stride: int
    named: int
    head: int
    size: int
    ids: list[bytes]

    @property
    def end(self) -> int:
        return self.start + self.stride * len(self.ids)


@lru_cache(maxsize=256)
def _entry_parts(before: int, id_bytes: int, after: int, size: int) -> struct.Struct:
    """What stands before an id, the id, what stands between it and a frame; the frame skipped."""
    return struct.Struct(f"{before}s{id_bytes}s{after}s{size + 2}x")


class StreamsLine(Line):
    """A connection on which `XREAD` answers a list of `(key, what was read)`.

    One such answer at a time may be under way; it is None where no stream holds anything new. All
    other commands answer as on any line.
    """

    def __init__(self, pool: redis.ConnectionPool) -> None:
        super().__init__(pool, read_bytes=_BUFFER)
        self._reading = False
        self._end = self._at = 0  # how much has come, and how much of it has been taken apart
        self._streams = _MISSING  # how many are still to come
        self._found: list[tuple[bytes, list[Read]]] = []

    def read(self, *command: Arg) -> None:
        """Send an `XREAD`; its answer is the next."""
        self.send(*command)
        self._reading = True
        self._end = self._at = 0
        self._streams, self._found = _MISSING, []

    def _fill(self) -> None:
        if not self._reading:
            super()._fill()
            return
        if len(self._buffer) - self._end < _BUFFER // 4:
            self._buffer += bytes(len(self._buffer))
        with memoryview(self._buffer) as view:
            self._end += self._receive_into(view[self._end :])

    def _gets(self) -> Any:
        if not self._reading:
            return super()._gets()
        self._check()
        if not self._end:
            return NOTHING
        if self._streams == _MISSING and not self._begins():
            return super()._gets() if not self._reading else NOTHING
        try:
            with memoryview(self._buffer) as view:
                while self._streams:
                    self._found.append(self._stream(view))
                    self._streams -= 1
        except _Incomplete:
            return NOTHING
        if self._at != self._end:
            raise redis.InvalidResponse("Redis has sent more than was asked for")
        self._reading = False
        found, self._found = self._found, []
        if len(self._buffer) > 4 * _BUFFER:  # frames as large as that are rare
            self._buffer = bytearray(_BUFFER)
        return found

    def _begins(self) -> bool:
        """Whether it has come so far that streams can be read from it.

        Whatever is no list of streams is an answer like any other. So is one that begins with a
        stream of few entries: most will then have few, and those are taken apart sooner one by one.
        """
        entries = 0
        try:
            streams, at = self._number(0, b"*")
            if streams != _MISSING:
                _, first = self._number(at, b"*")
                _, first = self._bulk(first)
                entries, _ = self._number(first, b"*")
        except _Incomplete:
            return False
        except redis.InvalidResponse:
            pass  # an error
        if entries < _FEW:
            self._reading = False
            self._reader.feed(self._buffer, 0, self._end)  # type: ignore[arg-type]  # any buffer
            return False
        self._streams, self._at = streams, at
        return True

    def _stream(self, view: memoryview) -> tuple[bytes, list[Read]]:
        """One stream's key and entries; raises `_Incomplete` while they have not all come."""
        _, at = self._number(self._at, b"*")
        key, at = self._bulk(at)
        left, at = self._number(at, b"*")
        spans: list[_Span | Raw] = []
        while left:
            span = self._frame(at)
            if span is None:
                raw, at = self._entry(at)
                spans.append(raw)
                left -= 1
                continue
            before = len(span.ids)
            self._follow(view, span, left)
            left -= len(span.ids) - before + 1
            at = span.end
            spans.append(span)
        self._at = at
        return key, [span if isinstance(span, list) else self._taken(view, span) for span in spans]

    @staticmethod
    def _taken(view: memoryview, span: _Span) -> Read:
        """A copy of what was found."""
        start, stride, _, head, size, ids = span
        if len(ids) == 1:
            return [ids[0], [b"frame", view[start + head : start + head + size].tobytes()]]
        return Run(ids, view[start : span.end].tobytes(), stride, head, size)

    def _frame(self, at: int) -> _Span | None:
        """The entry at a place, where it is a frame and nothing else."""
        buffer = self._buffer
        if not buffer.startswith(_ENTRY, at):
            self._wait_for(at + len(_ENTRY))
            return None
        id_, after = self._bulk(at + len(_ENTRY) - 1)
        if not buffer.startswith(_FRAME, after - 2):
            self._wait_for(after - 2 + len(_FRAME))
            return None
        size, start = self._number(after - 2 + len(_FRAME) - 1, b"$")
        self._wait_for(start + size + 2)
        named = after - 2 - len(id_) - at
        return _Span(at, start + size + 2 - at, named, start - at, size, [id_])

    def _follow(self, view: memoryview, span: _Span, most: int) -> None:
        """Find how many entries like the first of a span follow it, up to `most` in all."""
        start, stride, named, head, size, ids = span
        count = min(most, (self._end - start) // stride)
        if count < 2:
            return
        id_end = named + len(ids[0])
        first = view[start : start + named].tobytes()
        between = view[start + id_end : start + head].tobytes()
        parts = _entry_parts(named, len(ids[0]), head - id_end, size)
        rest = view[start + stride : start + count * stride]
        for one, id_, other in parts.iter_unpack(rest):
            if one != first or other != between:
                break
            ids.append(id_)

    def _entry(self, at: int) -> tuple[Raw, int]:
        """Any entry."""
        _, at = self._number(at, b"*")
        id_, at = self._bulk(at)
        count, at = self._number(at, b"*")
        fields = []
        for _ in range(count):
            value, at = self._bulk(at)
            fields.append(value)
        return [id_, fields], at

    def _bulk(self, at: int) -> tuple[bytes, int]:
        """The string at a place, and where the next thing stands."""
        size, start = self._number(at, b"$")
        self._wait_for(start + size + 2)
        return bytes(self._buffer[start : start + size]), start + size + 2

    def _number(self, at: int, kind: bytes) -> tuple[int, int]:
        """The number of a kind at a place, and where the next thing stands."""
        buffer = self._buffer
        end = buffer.find(b"\r\n", at, min(at + _LONGEST_NUMBER + 3, self._end))
        if end < 0 and self._end - at <= _LONGEST_NUMBER:
            raise _Incomplete
        if end < 0 or not buffer.startswith(kind, at):
            raise redis.InvalidResponse(f"expected {kind!r} and a number in the answer of Redis")
        return int(buffer[at + 1 : end]), end + 2

    def _wait_for(self, end: int) -> None:
        if end > self._end:
            raise _Incomplete
