"""Seconds by phase."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("plan", "transfer", "verify", "arrange", "place", "canary", "apply")


class Spans:
    """How long each phase of an update took; phases may run side by side."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Time what is done within."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - start)

    def add(self, phase: str, seconds: float) -> None:
        """Add time that was measured otherwise."""
        with self._lock:
            self.seconds[phase] += seconds  # type: ignore[assignment]  # a Counter of floats
