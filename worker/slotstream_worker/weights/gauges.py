"""What a worker counts of its weights, for Prometheus."""

from __future__ import annotations

from collections import Counter as Count

from prometheus_client import CollectorRegistry, Counter, Gauge

from slotstream_worker.weights.update import Update


class Gauges:
    """Counters and gauges of versions."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"slotstream_weights_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"slotstream_weights_{name}", text, labels, registry=registry)

        self.staging = gauge("staging_bytes", "Host memory of the version on its way in")
        self.resident = gauge("resident", "Versions on the device")
        self.sessions = gauge("sessions", "Sessions by the version that runs them", ("version",))
        self.applied = counter("applied", "Versions that became this worker's current one")
        self.refused = counter("refused", "Versions refused by this worker")
        self.changes = counter("session_changes", "Sessions that changed their version")
        self.moved = counter("bytes", "Bytes of shards received", ("transport",))
        self.seconds = counter("seconds", "Seconds spent on versions", ("phase",))
        self.plans = counter("plans", "Transfer plans: hit, refresh, miss", ("outcome",))
        self._counted: Count[tuple[str, str, str]] = Count()

    def planned(self, outcome: str) -> None:
        """A plan was found or made."""
        self.plans.labels(outcome).inc()

    def update(self, update: Update) -> None:
        """Count what has been added to an update since the last call."""
        for phase, seconds in update.spans.seconds.items():
            self.seconds.labels(phase).inc(self._new(update, phase, seconds))
        for transport, nbytes in update.moved.items():
            self.moved.labels(transport).inc(self._new(update, transport, nbytes))

    def _new(self, update: Update, what: str, total: float) -> float:
        key = (update.version, f"{id(update)}", what)
        before = self._counted[key]
        self._counted[key] = total  # type: ignore[assignment]  # a Counter of floats
        return max(total - before, 0.0)
