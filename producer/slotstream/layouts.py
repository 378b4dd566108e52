"""Encodings seen before: an app's outputs all have one layout, which is parsed once.

Between two outputs of an app only the data differs; the bytes before it (dtype, shape, names) are
the same. So the layout of the first is kept, and the next of that length is cut at the same
places where its other bytes are the same; anything else is parsed as if nothing were known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]

_MOST = 256
"""Layouts kept; the lengths of what comes are the sender's to choose."""


@dataclass(frozen=True)
class Part:
    """One array of an encoding: the bytes that stand before its data, and what the data is."""

    name: str
    head: bytes
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Length of the data."""
        return prod(self.shape) * self.dtype.itemsize


class Layout:
    """The bytes of an encoding that do not change, and where they stand.

    Args:
        parts: the arrays in order.
        named: whether it is a map of names to arrays.
    """

    def __init__(self, parts: Sequence[Part], *, named: bool) -> None:
        self.named, self.size = named, 0
        self._cuts = []
        for part in parts:
            start = self.size + len(part.head)
            stop = start + part.nbytes
            self._cuts.append(
                (part.name, part.head, self.size, start, stop, part.dtype, part.shape)
            )
            self.size = stop

    def read(self, raw: bytes) -> Array | dict[str, Array] | None:
        """The arrays of an encoding of `size` bytes, read-only; None where it has another layout.

        The data is copied out of `raw`, where it stands at any address.
        """
        found = {}
        for name, head, at, start, stop, dtype, shape in self._cuts:
            if not raw.startswith(head, at):
                return None
            found[name] = np.frombuffer(raw[start:stop], dtype).reshape(shape)
        return found if self.named else found[""]


class Layouts:
    """Layouts by the length of their encodings; the first one of a length is kept."""

    def __init__(self) -> None:
        self._known: dict[int, Layout | None] = {}

    def read(self, raw: bytes) -> Array | dict[str, Array] | None:
        """The arrays of an encoding; None where nothing like it has been seen."""
        layout = self._known.get(len(raw))
        return None if layout is None else layout.read(raw)

    def wants(self, size: int) -> bool:
        """Whether the layout of an encoding of this length is worth finding out."""
        return size not in self._known and len(self._known) < _MOST

    def keep(self, size: int, layout: Layout | None) -> None:
        """Keep the layout of a length; None for one that has no fixed layout."""
        self._known[size] = layout
