"""What an entry of `in` asks for, and how its answer is written. No Redis, no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slotstream.errors import BadFrame
from slotstream.named import AnyFrames

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


def _text(raw: bytes) -> str:
    return repr(raw[:40].decode("latin-1"))
