"""Boxes: axis-aligned parts of an array, as offset and extent along each axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np


@dataclass(frozen=True, slots=True)
class Box:
    """A part of an array: elements `offset` to `offset + extent` of each axis."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of an array."""
        return cls((0,) * len(shape), tuple(int(n) for n in shape))

    @property
    def volume(self) -> int:
        """Number of its elements; 1 for a box without axes."""
        return prod(self.extent)

    @property
    def slices(self) -> tuple[slice, ...]:
        """It, as an index of the array."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.offset, self.extent, strict=True)
        )

    def within(self, shape: Sequence[int]) -> bool:
        """Whether it is a part of an array of that shape."""
        return len(shape) == len(self.offset) == len(self.extent) and all(
            start >= 0 and size >= 0 and start + size <= full
            for start, size, full in zip(self.offset, self.extent, shape, strict=True)
        )

    def intersection(self, other: Box) -> Box | None:
        """What two boxes of one array share; None where that is nothing."""
        starts = tuple(map(max, zip(self.offset, other.offset, strict=True)))
        ends = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.extent, other.offset, other.extent, strict=True)
        ]
        extent = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, extent) if all(n > 0 for n in extent) else None

    def seen_from(self, frame: Box) -> Box:
        """The same elements, counted from the start of `frame`, which holds them."""
        return Box(
            tuple(a - b for a, b in zip(self.offset, frame.offset, strict=True)), self.extent
        )

    def __str__(self) -> str:
        parts = ", ".join(
            f"{start}:{start + size}" for start, size in zip(self.offset, self.extent, strict=True)
        )
        return f"[{parts}]"


def flaw(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Why the boxes do not hold every element of an array exactly once; empty where they do.

    Boxes within the array that do not overlap hold every element where their volumes add up to its
    own; so no element is looked at.
    """
    for box in boxes:
        if not box.within(shape):
            return f"the shard {box} does not lie within the shape {list(shape)}"
    held = [box for box in boxes if box.volume]
    if shape and held:
        starts = np.array([box.offset for box in held], np.int64)
        ends = starts + np.array([box.extent for box in held], np.int64)
        for k in range(len(held) - 1):
            shared = (starts[k + 1 :] < ends[k]) & (starts[k] < ends[k + 1 :])
            both = np.flatnonzero(shared.all(axis=1))
            if len(both):
                other = held[k + 1 + int(both[0])]
                return f"the shards {held[k]} and {other} overlap in {held[k].intersection(other)}"
    elif len(held) > 1:
        return "a single number has one shard"
    found, whole = sum(box.volume for box in held), prod(shape)
    if found != whole:
        return f"its shards hold {found:,} of {whole:,} elements" + (
            f"; there are {', '.join(map(str, held[:4]))}" if held else "; there is none"
        )
    return ""
