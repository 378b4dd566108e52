"""Which launches a round is made of: a few fixed row counts that together hold its rows."""

from __future__ import annotations

from collections.abc import Mapping

_LAUNCH_MS = 0.02
"""What a launch costs beside its computation; keeps a tie from becoming many launches."""


class Cover:
    """Cheapest sequence of row counts for any number of rows.

    Args:
        cost_ms: measured milliseconds of one launch, by row count.
    """

    def __init__(self, cost_ms: Mapping[int, float]) -> None:
        if not cost_ms or min(cost_ms) < 1:
            raise ValueError(f"row counts are 1 or more, got {sorted(cost_ms)}")
        self.cost_ms = dict(sorted(cost_ms.items()))
        self._best: list[tuple[float, int]] = [(0.0, 0)]  # for n rows: (cost, first count)

    def split(self, rows: int) -> list[int]:
        """Row counts of the launches that `rows` rows take, the full ones first."""
        self._extend(rows)
        counts = []
        while rows > 0:
            count = self._best[rows][1]
            counts.append(count)
            rows -= count
        return sorted(counts, reverse=True)

    def cost(self, rows: int) -> float:
        """Milliseconds that `rows` rows take."""
        self._extend(rows)
        return self._best[rows][0]

    def _extend(self, rows: int) -> None:
        # Dynamic programming over the number of rows: each is one launch and what is left.
        for n in range(len(self._best), rows + 1):
            self._best.append(
                min(
                    (self._best[max(n - count, 0)][0] + ms + _LAUNCH_MS, count)
                    for count, ms in self.cost_ms.items()
                )
            )
