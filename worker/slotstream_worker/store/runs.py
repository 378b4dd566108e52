"""Entries as they are read: one by one, or a run of frames as it came.

Most entries hold a frame and nothing else, and those of one stream are of one size. Such entries
are kept as the bytes that Redis sent, so that what is done for each of them is next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Raw = list[Any]
"""An entry as Redis gives it: its id (bytes), and the list of its fields and values in turn."""


class Run:
    """Entries that follow each other in a stream, each of them a frame and nothing else.

    Args:
        ids: theirs.
        data: what Redis sent of them: entry after entry, each of `stride` bytes.
        stride: bytes of an entry.
        head: where in it the encoded frame begins.
        size: bytes of the encoded frame.
    """

    __slots__ = ("data", "head", "ids", "size", "stride")

    def __init__(self, ids: list[bytes], data: bytes, stride: int, head: int, size: int) -> None:
        self.ids, self.data = ids, data
        self.stride, self.head, self.size = stride, head, size

    def __len__(self) -> int:
        return len(self.ids)

    def frames(self, start: int, count: int) -> NDArray[np.uint8]:
        """Encoded frames `[count, size]`, in place."""
        at = start * self.stride + self.head
        return np.ndarray((count, self.size), np.uint8, self.data, at, (self.stride, 1))

    def entry(self, k: int) -> Raw:
        """One of the entries."""
        at = k * self.stride + self.head
        return [self.ids[k], [b"frame", self.data[at : at + self.size]]]

    def entries(self) -> list[Raw]:
        """All of them, one by one."""
        return [self.entry(k) for k in range(len(self.ids))]


Read = Raw | Run


def entries_of(parts: Iterable[Read]) -> list[Raw]:
    """What was read, one by one."""
    return [raw for part in parts for raw in (part.entries() if isinstance(part, Run) else [part])]
