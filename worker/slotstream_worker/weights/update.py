"""One version's way through a worker: the states, and which may follow which. No I/O."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from slotstream_worker.weights.spans import Spans

NEXT = {
    "discovered": {"planned", "refused", "released"},
    "planned": {"staging", "discovered", "refused", "released"},
    "staging": {"verified", "discovered", "refused", "released"},
    "verified": {"applied", "refused", "released"},
    "applied": {"released", "applied"},
    "released": {"discovered", "applied"},
    "refused": {"discovered"},
}
"""`verified`: every digest is right, the canary has sung, and the variables are on the device.
`applied`: sessions begin on it, or have changed to it. `released`: nothing of it is held here."""


@dataclass
class Update:
    """A version in one worker. `tries`: how often its staging was begun."""

    version: str
    state: str = "discovered"
    since: float = field(default_factory=time.time)
    reason: str = ""
    nbytes: int = 0
    plan: str = ""
    tries: int = 0
    moved: dict[str, int] = field(default_factory=dict)
    spans: Spans = field(default_factory=Spans)

    def to(self, state: str, reason: str = "") -> None:
        """Go to a state; raises `ValueError` where that may not follow."""
        if state not in NEXT[self.state]:
            raise ValueError(f"version {self.version} cannot go from {self.state} to {state}")
        self.state, self.reason, self.since = state, reason, time.time()

    def seen(self) -> dict[str, Any]:
        """For a report."""
        return {
            "version": self.version,
            "state": self.state,
            "since": round(self.since, 3),
            "reason": self.reason,
            "bytes": self.nbytes,
            "plan": self.plan,
            "moved": dict(self.moved),
            "seconds": {k: round(v, 4) for k, v in self.spans.seconds.items()},
        }
