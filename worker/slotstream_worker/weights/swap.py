"""The loop's part in new weights: what has come is applied, sessions change, the old is released.

Called each turn; where nothing is afoot it compares a few values and returns.
"""

from __future__ import annotations

import logging
import time

from slotstream_worker.checkpoints import Allowance
from slotstream_worker.host import Host
from slotstream_worker.weights.receiver import Receiver

log = logging.getLogger(__name__)

_SHARE = 4
"""One session in so many changes at a time at most, so that rounds go on meanwhile."""
_LEAST = 8
_LOOK_S = 0.1


class Swap:
    """Brings the receiver's versions to the host's sessions.

    Args:
        host: the sessions.
        receiver: where versions come from.
        allowance: bytes of state a second, which changing sessions share with all checkpoints.
    """

    def __init__(self, host: Host, receiver: Receiver, allowance: Allowance) -> None:
        self.host, self.receiver, self._allowance = host, receiver, allowance
        self.residents = host.residents
        self.residents.most = receiver.config.resident_versions
        self._looked_at = self._applied_at = 0.0
        self._changes = 0
        self._shown: set[str] = set()

    def turn(self) -> None:
        """Apply what is due."""
        residents, receiver = self.residents, self.receiver
        for version, variables in receiver.take():
            self.host.wake(residents.add(version, variables))
        goal = receiver.goal
        if goal != residents.current or receiver.policy != residents.policy:
            self._point(goal)
        residents.look(receiver.looks)
        if residents.lags:
            size = max(self.host.engine.pool.slot_bytes, 1)
            share = max(len(self.host) // _SHARE, _LEAST)
            residents.mark(min(share, self._allowance.rows(size)))
        now = time.monotonic()
        if now - self._looked_at > _LOOK_S:
            self._looked_at = now
            self._look()

    def _point(self, goal: str) -> None:
        if not self.residents.point(goal, self.receiver.policy):
            return
        log.info(
            "weights %s are applied: sessions change to them (%s)", goal, self.residents.policy
        )
        self._applied_at = time.monotonic()
        self.host.wake(self.residents.back())
        self.residents.lag(self.host.hosted.values())
        self.receiver.gauges.applied.inc()
        self.receiver.note(goal, "applied")

    def _look(self) -> None:
        """What changes less often: versions that are missing, and those nobody needs."""
        residents, receiver = self.residents, self.receiver
        receiver.want(residents.missing())
        for version, reason in receiver.passed_over():
            residents.give_up(version, reason)
        residents.coming = receiver.coming
        for version in residents.unused(receiver.needed):
            log.info("weights %s are released", version)
            receiver.note(version, "released")
        receiver.sessions = residents.sessions()
        gauges = receiver.gauges
        gauges.resident.set(len(self.host.engine.versions) - 1)
        for version in self._shown - receiver.sessions.keys():
            gauges.sessions.remove(version)
        self._shown = set(receiver.sessions)
        for version, count in receiver.sessions.items():
            gauges.sessions.labels(version).set(count)
        gauges.changes.inc(residents.changes - self._changes)
        self._changes = residents.changes
