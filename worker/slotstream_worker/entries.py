"""What an entry of `in` asks for, and how its answer is written. No Redis, no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgpack
import numpy as np

from slotstream.arguments import around
from slotstream.codec import encode, header
from slotstream.errors import BadFrame
from slotstream.named import AnyFrames
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.store.commits import Answer

Frames = np.ndarray[Any, np.dtype[np.generic]]

OPS = ("reset",)
_KNOWN = {b"frame", b"end", b"op", b"target"}


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of `in`, checked.

    `payload` is the frame's data bytes, None without a frame. `error` makes everything else but
    `end` void: an entry is all or nothing. `mark` is a close mark, neither answered nor counted.
    `steps` are those of the frame that are real; a session's last may have fewer.
    """

    id: bytes
    payload: bytes | None = None
    reset: bool = False
    end: bool = False
    error: BadFrame | None = None
    mark: bool = False
    steps: int = 0


class EntryReader:
    """Reads the entries of one app.

    Args:
        frames: codec of the app's frames.
        finite: refuse frames that hold NaN or an infinity.
        short: a session's last frame may have fewer steps.
    """

    def __init__(self, frames: AnyFrames, *, finite: bool = False, short: bool = True) -> None:
        self.frames, self._finite, self._short = frames, finite, short

    def frames_of(self, raws: Sequence[bytes]) -> tuple[Frames, list[int]]:
        """Many encoded frames at once: frames `[entries, frame, *sample_shape]`, and what is left.

        The places of those that are not encoded as usual come second: `read` says what they are,
        and their frames here are undefined.
        """
        frames, others = self.frames.many(raws)
        if self._finite:
            others |= ~self.frames.finite(frames)
        return frames, np.flatnonzero(others).tolist()

    def read(self, id: bytes, raw: list[bytes]) -> Entry:  # noqa: A002 (the field's own name)
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
            payload, steps, reset = self._content(fields)
        except BadFrame as error:
            return Entry(id, end=end, error=error)
        return Entry(id, payload, reset, end, steps=steps)

    def _content(self, fields: Mapping[bytes, bytes]) -> tuple[bytes | None, int, bool]:
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
            return None, 0, op is not None
        payload, steps = self.frames.read(fields[b"frame"])
        if steps < self.frames.shape[0]:
            self._may_be_short(steps, b"end" in fields)
        frame = np.frombuffer(payload, self.frames.dtype).reshape(1, *self.frames.shape)
        if self._finite and not self.frames.finite(frame).all():
            raise BadFrame(
                "not_finite",
                "this app takes finite values only, and the frame holds NaN or an infinity",
            )
        return payload, steps, op is not None

    def _may_be_short(self, steps: int, end: bool) -> None:
        frame = self.frames.shape[0]
        if not end:
            raise BadFrame(
                "shape",
                f"this app takes frames of {frame} steps, {self.frames.described}, got {steps}; "
                "one of fewer is the last of its session, and comes with end = 1",
            )
        if not self._short:
            raise BadFrame(
                "shape",
                f"this app takes frames of {frame} steps, the last one too, got {steps}: what its "
                "replies carry is made of whole frames",
            )


class AnswerWriter:
    """Writes the answers of one model: encoded outputs, and the fields of `out` entries."""

    def __init__(self, model: StreamModel) -> None:
        self._outputs, self._single = model.outputs, model.single
        packer = msgpack.Packer()
        parts: list[bytes] = [] if model.single else [packer.pack_map_header(len(model.outputs))]
        self._layout: list[tuple[str, int, int]] = []  # name, and where its data begin and end
        at = sum(map(len, parts))
        for output in model.outputs:
            head = header(output.dtype, output.shape)
            if not model.single:
                head = packer.pack(output.name) + head
            nbytes = prod(output.shape) * output.dtype.itemsize
            parts += [head, bytes(nbytes)]
            self._layout.append((output.name, at + len(head), at + len(head) + nbytes))
            at += len(head) + nbytes
        before, after = around(at)
        self._before, self._after = len(before), len(after)
        self._layout = [(name, start + len(before), stop + len(before))
                        for name, start, stop in self._layout]  # fmt: skip
        self._template = np.frombuffer(b"".join([before, *parts, after]), np.uint8)

    def outputs(self, outputs: Mapping[str, np.ndarray[Any, Any]]) -> list[bytes]:
        """The encoded outputs of a launch's rows, from arrays `[rows, frame, ...]` by name.

        All rows at once: an encoding of fixed shapes differs only in its data. Each is packed as
        an argument of a command, as it goes to Redis; `raw` is without.
        """
        rows = len(next(iter(outputs.values())))
        size = len(self._template)
        block = np.empty((rows, size), np.uint8)
        block[:] = self._template
        for name, start, stop in self._layout:
            if start == stop:
                continue
            array = np.ascontiguousarray(outputs[name])
            block[:, start:stop] = array.reshape(rows, -1).view(np.uint8).reshape(rows, -1)
        data = block.tobytes()
        return [data[at : at + size] for at in range(0, rows * size, size)]

    def raw(self, packed: bytes) -> bytes:
        """An encoded output that was packed as an argument of a command."""
        return packed[self._before : -self._after]

    def cut(self, outputs: Mapping[str, np.ndarray[Any, Any]], row: int, steps: int) -> bytes:
        """The encoded outputs of one row of a launch, of whose frame only `steps` were real."""
        arrays = {
            output.name: outputs[output.name][row][:steps]
            if output.timed
            else outputs[output.name][row]
            for output in self._outputs
        }
        return encode(next(iter(arrays.values())) if self._single else arrays)

    def usual(self, id: bytes, packed: bytes, weights: str) -> Answer:  # noqa: A002 (the field's own name)
        """The answer of an entry that was a frame and nothing else, from its packed output."""
        return Answer(id, ("output", self.raw(packed), "weights", weights))

    def output(self, entry: Entry, output: bytes, weights: str) -> Answer:
        """The answer of an entry whose frame ran, from its encoded output."""
        fields: tuple[bytes | str, ...] = ("output", output, "weights", weights)
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
