"""Finding the frames: Redis says which streams have changed, and those are read.

`CLIENT TRACKING` tells a connection once that a key it has read has changed, also one that did
not exist yet, and again only after the next read. So a read both fetches and re-arms, and an
idle worker sleeps on the socket where the news comes in. It is a hint for speed: a slow sweep
over all streams is the truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import redis
from redis.exceptions import ResponseError

from slotstream.arguments import Arg
from slotstream.ids import EntryId
from slotstream.lines import Line
from slotstream.names import Keys

Raw = list[Any]
"""An entry as Redis gives it: its id (bytes), and the list of its fields and values in turn."""

_STREAMS_A_READ = 512
_BYTES_A_READ = 2 * 2**20
_LEAST_A_READ = 2


class Portions:
    """How many streams a read names, and how many entries of each it asks for.

    A read holds Redis while it copies, so what it may bring is bounded. Streams of which each has
    one new entry are read by the hundred, those with a backlog a few at a time: what the reads
    before found says which it is.

    Args:
        most: entries of a stream, at most.
        entry_bytes: about what one takes.
    """

    def __init__(self, most: int, entry_bytes: int) -> None:
        self._most, self._entry_bytes = most, max(entry_bytes, 1)
        self.count = most
        """Entries to ask for of each stream."""

    @property
    def streams(self) -> int:
        """Streams to name."""
        return max(1, min(_STREAMS_A_READ, _BYTES_A_READ // (self.count * self._entry_bytes)))

    def found(self, entries: int, streams: int) -> None:
        """Note how many entries a read brought, of so many streams that had any."""
        if 2 * entries > self.count * streams:
            self.count = min(4 * self.count, self._most)
        elif 4 * entries <= self.count * streams:
            self.count = min(max(self.count // 2, _LEAST_A_READ), self._most)


CONTROL_A_READ = "64"
WAITING_A_READ = "127"


class Queues(NamedTuple):
    """Control entries (id, session), sessions that wait, and what an operator asks."""

    control: list[tuple[bytes, str]]
    waiting: list[str]
    order: str


_CHANNEL = "__redis__:invalidate"


class Inbox:
    """The `in` streams of one partition, and its control stream and queue.

    Two connections: one reads (and is thereby tracked), one hears what has changed. A read is
    asked for and taken in later, when it has come.
    """

    def __init__(self, pool: redis.ConnectionPool, keys: Keys, worker: str) -> None:
        self.keys = keys
        self.heard, self.reader = _tracking(pool)
        self._in = (keys.prefix + "in:").encode()
        self._pinged = False
        self._order_key = keys.order(worker)
        self._asked: tuple[dict[str, bytes], int] | None = None
        self._came: dict[str, list[Raw]] | None = None
        self.news = True
        """Whether control, the queue or the order to this worker may have changed."""
        self.changed: set[str] = set()
        """Sessions whose stream has got new entries since it was last asked for."""

    def listen(self, timeout_s: float = 0.0, *, readable: bool = False) -> None:
        """Take in what Redis says has changed; waits up to `timeout_s` for the first news."""
        while self.heard.ready(timeout_s, readable=readable):
            timeout_s, readable = 0.0, False
            message = self.heard.receive()
            kind = message[0]
            if kind == b"message":
                # No list of keys: everything has changed (FLUSHALL, or the table overflowed).
                if message[2] is None:
                    raise redis.ConnectionError("Redis was flushed; everything is read anew")
                if isinstance(message[2], list):  # anything else is somebody's PUBLISH
                    for key in message[2]:
                        self._note(key)
            elif kind == b"pong":
                self._pinged = False

    def _note(self, key: bytes) -> None:
        if key.startswith(self._in):
            self.changed.add(key[len(self._in) :].decode("latin-1"))
        else:
            self.news = True

    def queues(self) -> Queues:
        """The start of `control` and of the queue, and the order; all watched again."""
        self.news = False
        control, waiting, order = self._calls(
            [
                ("XRANGE", self.keys.control, "-", "+", "COUNT", CONTROL_A_READ),
                ("ZRANGE", self.keys.waiting, "0", WAITING_A_READ),
                ("GET", self._order_key),
            ],
            missing=(),  # a key that is no stream or set holds nothing for anybody
        )
        entries = [(id_, _session(fields)) for id_, fields in control]
        return Queues(entries, [raw.decode() for raw in waiting], (order or b"").decode())

    @property
    def asking(self) -> bool:
        """Whether a read is under way, or has come and has not been taken in."""
        return self._asked is not None or self.came

    @property
    def came(self) -> bool:
        """Whether a read has come, while something else was waited for on its connection."""
        return self._came is not None

    def ask(self, positions: Mapping[str, bytes], count: int) -> None:
        """Ask for up to `count` entries behind each session's position; `arrived` has them later.

        One read at a time. The streams are watched again from when Redis reads them.
        """
        self.changed.difference_update(positions)
        self.reader.send(*self._xread(positions, count))
        self._asked = (dict(positions), count)

    def arrived(self, *, readable: bool = False) -> dict[str, list[Raw]] | None:
        """What has come of the read that was asked for; None while it has not come.

        Sessions without a new entry are left out, and so is a key that is no stream.
        """
        if self._asked and self.reader.ready(readable=readable):
            self._finish_read()
        came = self._came
        if came is not None:
            self._came = None
        return came

    def _finish_read(self) -> None:
        """Wait for the read under way, so that the next answer is that of the next command."""
        if self._asked is None:
            return
        positions, count = self._asked
        try:
            came = self._parsed(self.reader.receive())
            self._asked = None
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            self._asked = None
            came = {}
            # One key that is no stream would hide all the others.
            for session, position in positions.items():
                try:
                    answer = self.reader.call(*self._xread({session: position}, count))
                except ResponseError as error:
                    if not str(error).startswith("WRONGTYPE"):
                        raise
                else:
                    came.update(self._parsed(answer))
        self._came = came

    def _parsed(self, answer: Any) -> dict[str, list[Raw]]:
        skip = len(self._in)
        return {key[skip:].decode(): entries for key, entries in answer or ()}

    def _xread(self, positions: Mapping[str, bytes], count: int) -> tuple[Arg, ...]:
        prefix = self.keys.prefix + "in:"
        streams = [prefix + session for session in positions]
        return ("XREAD", "COUNT", count, "STREAMS", *streams, *positions.values())

    def between(self, ranges: Mapping[str, tuple[EntryId, EntryId]]) -> dict[str, list[Raw]]:
        """All entries of each session after the first id, up to and including the second."""
        answers = self._calls(
            [
                ("XRANGE", self.keys.inbox(s), f"({low}", str(high))
                for s, (low, high) in ranges.items()
            ],
            missing=[],
        )
        return dict(zip(ranges, answers, strict=True))

    def check(self) -> None:
        """Ask the silent connection for a sign; raises where the last one never came."""
        if self._pinged:
            raise redis.ConnectionError("the connection that hears of changes has gone silent")
        self._pinged = True
        self.heard.send("PING")

    def close(self) -> None:
        """Close both connections."""
        self.heard.close()
        self.reader.close()

    def _calls(self, commands: list[tuple[str, ...]], missing: Any = None) -> list[Any]:
        """Answers in order; `missing` for a key of another type, where it is given."""
        self._finish_read()
        answers = self.reader.calls(commands)
        for k, answer in enumerate(answers):
            if isinstance(answer, Exception):
                if missing is None or not str(answer).startswith("WRONGTYPE"):
                    raise answer
                answers[k] = missing
        return answers


def _tracking(pool: redis.ConnectionPool) -> tuple[Line, Line]:
    """A connection that hears of every change to what the other one has read."""
    heard = Line(pool)
    try:
        reader = Line(pool, read_bytes=2**20)
        try:
            listener = heard.call("CLIENT", "ID")
            heard.call("SUBSCRIBE", _CHANNEL)
            reader.call("CLIENT", "TRACKING", "ON", "REDIRECT", listener)
        except BaseException:
            reader.close()
            raise
    except BaseException as error:
        heard.close()
        if isinstance(error, ResponseError) and "redirect" in str(error):
            # Cut off between the commands: a broken connection like any other.
            raise redis.ConnectionError(f"the connection that hears is gone: {error}") from error
        raise
    return heard, reader


def _session(fields: list[bytes]) -> str:
    """The session that a control entry names; a name that none can have where it is unreadable."""
    names = dict(zip(fields[::2], fields[1::2], strict=False))
    return names.get(b"session", b"").decode("latin-1")
