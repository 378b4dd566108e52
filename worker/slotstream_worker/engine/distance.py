"""How far two arrays of the same shape and dtype are apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def apart(pairs: Iterable[tuple[Array, Array]]) -> tuple[float, float]:
    """The largest difference over all pairs, and the largest value of the second of each.

    NaN against NaN is no difference; against anything else it is an infinite one. So is an infinity
    against another value.
    """
    largest = scale = 0.0
    for a, b in pairs:
        kind: Any = np.complex128 if a.dtype.kind == "c" else np.float64
        x, y = a.astype(kind), b.astype(kind)
        with np.errstate(invalid="ignore"):
            difference = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
            magnitude = np.abs(y[np.isfinite(y)])
        difference = np.where(np.isnan(difference), np.inf, difference)
        largest = max(largest, float(difference.max(initial=0.0)))
        scale = max(scale, float(magnitude.max(initial=0.0)))
    return largest, scale
