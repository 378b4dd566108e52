"""The entries of one session that wait here, the oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from slotstream_worker.store.runs import Raw, Read, Run, entries_of


class Backlog:
    """Entries that wait; those that were read as a run stay together until they are taken."""

    __slots__ = ("_parts", "_taken", "count")

    def __init__(self) -> None:
        self._parts: deque[Read] = deque()
        self._taken = 0  # of the first part, where that is a run
        self.count = 0
        """How many entries wait."""

    def __len__(self) -> int:
        return self.count

    def extend(self, parts: Sequence[Read], count: int) -> None:
        """Add what was read: so many entries."""
        self._parts.extend(parts)
        self.count += count

    def pop(self) -> Raw:
        """Take the oldest entry."""
        part = self._parts[0]
        self.count -= 1
        if type(part) is not Run:
            self._parts.popleft()
            return part  # type: ignore[return-value]
        raw = part.entry(self._taken)
        self._taken += 1
        if self._taken == len(part.ids):
            self._parts.popleft()
            self._taken = 0
        return raw

    def take(self, count: int, ids: list[bytes], frames: list[NDArray[np.uint8]]) -> None:
        """Take entries that are frames and nothing else.

        Args:
            count: how many.
            ids: theirs are added to it.
            frames: their encoded frames are added to it, one or more `[n, size]` at a time.
        """
        self.count -= count
        parts = self._parts
        while count:
            part = parts[0]
            if type(part) is Run:
                start, held = self._taken, part.ids
                n = min(count, len(held) - start)
                ids += held[start : start + n]
                frames.append(part.frames(start, n))
                self._taken = start + n
                if self._taken == len(held):
                    parts.popleft()
                    self._taken = 0
            else:
                id_, fields = parts.popleft()  # type: ignore[misc]
                ids.append(id_)
                frames.append(np.frombuffer(fields[1], np.uint8).reshape(1, -1))
                n = 1
            count -= n

    def put_back(self, raws: Sequence[Raw]) -> None:
        """Put entries that were taken before all others."""
        if self._taken:
            rest = entries_of([self._parts.popleft()])[self._taken :]
            self._parts.extendleft(reversed(rest))
            self._taken = 0
        self._parts.extendleft(reversed(raws))
        self.count += len(raws)

    def clear(self) -> None:
        """Forget all."""
        self._parts.clear()
        self.count = self._taken = 0

    def __iter__(self) -> Iterator[Raw]:
        return iter(entries_of(self._parts)[self._taken :])
