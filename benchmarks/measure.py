"""Two things in turn, several times; their ratio with its spread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """`ratio` is the median of A/B pair by pair, `low` and `high` its quartiles; ms are medians."""

    name: str
    a: str
    b: str
    a_ms: float
    b_ms: float
    ratio: float
    low: float
    high: float
    repeats: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def ratio(
    name: str,
    a: str,
    run_a: Callable[[], Any],
    b: str,
    run_b: Callable[[], Any],
    *,
    repeats: int = 9,
    inner: int = 20,
    a_units: int = 1,
    b_units: int = 1,
) -> Ratio:
    """Time `run_a` and `run_b` alternately, `inner` calls at a time, per unit of work each."""
    run_a(), run_b()
    pairs = [(_time(run_a, inner) / a_units, _time(run_b, inner) / b_units) for _ in range(repeats)]
    times = np.asarray(pairs)
    ratios = times[:, 0] / times[:, 1]
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    a_ms, b_ms = 1e3 * np.median(times, axis=0)
    return Ratio(
        name, a, b, float(a_ms), float(b_ms), float(middle), float(low), float(high), repeats
    )


def _time(run: Callable[[], Any], inner: int) -> float:
    start = time.perf_counter()
    for _ in range(inner):
        run()
    return (time.perf_counter() - start) / inner
