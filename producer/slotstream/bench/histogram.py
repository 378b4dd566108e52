"""Latencies by the million in a few kilobytes: counts in bins whose widths grow with the value."""

from __future__ import annotations

import math

import numpy as np

PRECISION = 0.01
"""How far a percentile may be off, relative to itself."""

_LEAST_S, _MOST_S = 1e-6, 1e4
_GROWTH = (1 + PRECISION) ** 2
_BINS = math.ceil(math.log(_MOST_S / _LEAST_S) / math.log(_GROWTH))
_PENDING = 2048


class Histogram:
    """Durations in seconds, 1 us to 10,000 s; percentiles of them within `PRECISION`.

    What is added is counted in batches, so that adding costs an append.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(_BINS, np.int64)
        self._pending: list[float] = []
        self._least, self.max_s = math.inf, 0.0

    def add(self, duration_s: float) -> None:
        """Add a duration."""
        self._pending.append(duration_s)
        if len(self._pending) >= _PENDING:
            self.flush()

    def flush(self) -> None:
        """Count what was added."""
        values, self._pending = np.asarray(self._pending), []
        if len(values):
            self._least = min(self._least, float(values.min()))
            self.max_s = max(self.max_s, float(values.max()))
            places = np.log(np.maximum(values, _LEAST_S) / _LEAST_S) / math.log(_GROWTH)
            self._counts += np.bincount(
                np.minimum(places.astype(np.int64), _BINS - 1), minlength=_BINS
            )

    @property
    def count(self) -> int:
        """How many durations are counted."""
        return int(self._counts.sum())

    def percentile(self, percent: float) -> float:
        """The least duration that so many percent of all do not exceed; nan of none."""
        counts = self._counts
        below = np.cumsum(counts)
        total = int(below[-1])
        if not total:
            return math.nan
        rank = min(max(math.ceil(percent / 100 * total), 1), total)
        if rank == total:
            return self.max_s
        place = int(np.searchsorted(below, rank))
        middle = _LEAST_S * _GROWTH ** (place + 0.5)
        return float(min(max(middle, self._least), self.max_s))
