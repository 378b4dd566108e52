"""When the sessions of a partition are compared with Redis: all of them in every interval.

A few at a time, so that nobody waits for it, however many there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

SESSIONS_A_CALL = 256
"""Sessions that one call compares: it holds Redis for about a millisecond."""


class Sweep:
    """Turns through the sessions, one in `interval_s`."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._began = float("-inf")
        self._left: deque[str] = deque()
        self._count = 0

    def over(self, now: float) -> bool:
        """Whether the next turn is to begin."""
        return not self._left and now - self._began > self._interval_s

    def begin(self, sessions: Iterable[str], now: float) -> None:
        """Begin a turn through the sessions there are now."""
        self._began, self._left = now, deque(sessions)
        self._count = len(self._left)

    def part(self, now: float, *, rest: bool = False) -> list[str]:
        """The sessions that are to be compared next; none while this turn is ahead of its time.

        Args:
            now: the time.
            rest: whatever the time.
        """
        behind = self._count * min((now - self._began) / (0.8 * self._interval_s), 1.0)
        if not self._left or (not rest and self._count - len(self._left) > behind):
            return []
        count = min(SESSIONS_A_CALL, len(self._left))
        return [self._left.popleft() for _ in range(count)]
