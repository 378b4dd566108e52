"""What the figures are to reach: one target a figure, by its key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.measure import Figure


@dataclass(frozen=True)
class Target:
    """A limit on a figure's median, in the figure's own unit."""

    limit: float
    at: Literal["least", "most"]
    unit: str = "x"

    def met(self, figure: Figure) -> bool:
        """Whether the figure reaches it."""
        median = figure.value.median
        return median >= self.limit if self.at == "least" else median <= self.limit


def _least(limit: float) -> Target:
    return Target(limit, "least")


def _most(limit: float, unit: str = "x") -> Target:
    return Target(limit, "most", unit)


TARGETS: dict[str, Target] = {
    **{f"engine.{sessions}.1": _least(0.85) for sessions in (256, 1024, 4096)},
    "server.64.64": _least(1.3),
    "server.256.256": _least(2.5),
    "server.1024.1024": _least(2.5),
    "server.4096.4096": _least(4.0),
    "server.1024.16": _least(25.0),
    **{f"worker.sparx.{sessions}": _least(2.5) for sessions in (256, 1024)},
    **{f"worker.bound.{sessions}": _least(0.7) for sessions in (256, 1024)},
    "latency.1.10.over_echo": _most(1.0, "ms"),
    "latency.1000.50.tail": _most(5.0),
    "growth.open.16384": _most(1.2),
    "checkpoint.1KiB.1": _least(0.95),
    "idle.cpu.10000": _most(3.0, "%"),
    "memory.redis": _most(1500.0, "B"),
    "memory.worker": _most(2000.0, "B"),
    "weights.stall.changing": _most(1.0),
    **{f"weights.transfer.{kind}.moved": _least(0.5) for kind in ("redis", "file", "peer")},
}
