"""Who of the other workers is dead: no lease, and time enough to have renewed it."""

from __future__ import annotations

from collections.abc import Iterable


class Judge:
    """Tells the dead from those whose leases an outage has taken, of which they know no more.

    A worker that lives renews its lease every quarter. After a long outage every lease may be
    gone, so nobody is judged for a whole lease. After a short one (a cut connection, a failover to
    a replica that lacked the last second) whoever has no lease must lack it for half a lease. That
    time goes on through further short outages: with connections cut again and again the dead would
    otherwise never be found.

    Args:
        lease_s: for how long a lease lasts.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._contact_at = self._none_before = self._patient_until = 0.0
        self._missing_since: dict[str, float] = {}

    def contact(self, now: float) -> None:
        """Redis has been spoken to."""
        self._contact_at = now

    def joined(self, now: float) -> None:
        """First connected: how long Redis has been there, and for whom, is not known."""
        self._none_before = now + self._lease_s
        self._missing_since.clear()
        self.contact(now)

    def connected(self, now: float) -> None:
        """Connected again after an outage."""
        if now - self._contact_at > self._lease_s / 2:
            self.joined(now)
            return
        self._patient_until = now + self._lease_s / 2
        self.contact(now)

    def sits(self, now: float) -> bool:
        """Whether anybody may be judged now."""
        return now > self._none_before

    def dead(self, missing: Iterable[str], now: float) -> list[str]:
        """Those to be taken from.

        Args:
            missing: all workers that hold no lease now.
        """
        self._missing_since = {w: self._missing_since.get(w, now) for w in missing}
        patient = now < self._patient_until
        return [
            worker
            for worker, since in self._missing_since.items()
            if not patient or now - since > self._lease_s / 2
        ]
