"""What an entry of `in` asks for, and how its answer is written. No Redis, no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from slotstream.codec import FrameCodec, header
from slotstream.errors import BadFrame
from slotstream.ids import EntryId
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.store.table import Answer

OPS = ("reset",)
_KNOWN = {b"frame", b"end", b"op", b"target"}


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of `in`, checked.

    `payload` is the frame's data bytes, None without a frame. `error` makes everything else but
    `end` void: an entry is all or nothing. `mark` is a close mark, neither answered nor counted.
    """

    id: EntryId
    payload: bytes | None = None
    reset: bool = False
    end: bool = False
    error: BadFrame | None = None
    mark: bool = False


class EntryReader:
    """Reads the entries of one app.

    Args:
        frames: codec of the app's frames.
        finite: refuse frames that hold NaN or an infinity.
    """

    def __init__(self, frames: FrameCodec, *, finite: bool = False) -> None:
        self.frames = frames
        self._finite = finite and np.issubdtype(frames.dtype, np.inexact)

    def read(self, id: EntryId, raw: list[bytes]) -> Entry:  # noqa: A002 (the field's own name)
        """Read one entry from its fields and values in turn; never raises."""
        if len(raw) == 2 and raw[0] == b"frame":  # the usual entry
            fields = {b"frame": raw[1]}
        else:
            items = iter(raw)
            fields = dict(zip(items, items, strict=True))
            if fields.get(b"op") == b"close":
                return Entry(id, mark=True)
        end = fields.get(b"end") == b"1"
        try:
            if 2 * len(fields) != len(raw):
                twice = next(name for name in fields if raw[::2].count(name) > 1)
                raise BadFrame("unknown_field", f"an entry has each field once, and this one has "
                                                f"{_text(twice)} twice")  # fmt: skip
            payload, reset = self._content(fields)
        except BadFrame as error:
            return Entry(id, end=end, error=error)
        return Entry(id, payload, reset, end)

    def _content(self, fields: Mapping[bytes, bytes]) -> tuple[bytes | None, bool]:
        if unknown := sorted(fields.keys() - _KNOWN):
            raise BadFrame(
                "unknown_field",
                f"an entry has frame, end, op and target, and this one also {_text(unknown[0])}",
            )
        if fields.get(b"end", b"1") != b"1":
            raise BadFrame("bad_end", f"end is 1 or absent, got {_text(fields[b'end'])}")
        op = fields.get(b"op")
        if op is not None and op.decode("latin-1") not in OPS:
            raise BadFrame(
                "unknown_op", f"this worker knows the op {', '.join(OPS)}, got {_text(op)}"
            )
        if b"target" in fields:
            raise BadFrame(
                "unknown_field", "target goes with the op fork, which this worker does not know"
            )
        if b"frame" not in fields:
            if op is None and b"end" not in fields:
                raise BadFrame("no_frame", "an entry has a frame, an op or an end")
            return None, op is not None
        payload = self.frames.payload(fields[b"frame"])
        if self._finite and not np.isfinite(np.frombuffer(payload, self.frames.dtype)).all():
            raise BadFrame(
                "not_finite",
                "this app takes finite values only, and the frame holds NaN or an infinity",
            )
        return payload, op is not None


class AnswerWriter:
    """Writes the answers of one model: fields of an `out` entry."""

    def __init__(self, model: StreamModel) -> None:
        self._weights = model.weights
        self._single = model.single
        self._headers = [
            (output.name, header(output.dtype, output.shape)) for output in model.outputs
        ]
        self._map = msgpack.Packer().pack_map_header(len(self._headers))

    def output(self, entry: Entry, row: Mapping[str, np.ndarray[Any, Any]]) -> Answer:
        """The answer of an entry whose frame ran; `row` holds its outputs `[frame, ...]`."""
        parts: list[bytes] = [] if self._single else [self._map]
        for name, head in self._headers:
            if not self._single:
                parts.append(msgpack.packb(name))
            parts += [head, row[name].tobytes()]
        fields: tuple[bytes | str, ...] = ("output", b"".join(parts), "weights", self._weights)
        return Answer(entry.id, (*fields, "op", "reset") if entry.reset else fields)

    def op(self, entry: Entry) -> Answer:
        """The answer of an entry that holds an op, or only an end."""
        return Answer(entry.id, ("op", "reset") if entry.reset else (), effect=entry.reset)

    def error(self, entry: Entry, code: str, message: str) -> Answer:
        """The answer of an entry that changed nothing."""
        raw = msgpack.packb({"code": code, "message": message[:500]})
        return Answer(entry.id, ("error", raw), effect=False)


def _text(raw: bytes) -> str:
    return repr(raw[:40].decode("latin-1"))
