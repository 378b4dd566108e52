"""What a worker counts, for Prometheus; each worker has a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server


class Metrics:
    """Counters, gauges and times of one worker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = self._counter
        self.frames = counter("frames", "Frames run, replays included")
        self.rounds = counter("rounds", "Rounds run")
        self.replies = counter("replies", "Replies published")
        self.errors = counter("error_replies", "Error replies published")
        self.checkpoints = counter("checkpoints", "Checkpoints written")
        self.checkpoint_bytes = counter("checkpoint_bytes", "Bytes of state written")
        self.replayed = counter("replayed", "Frames run again after a takeover")
        self.lost = counter("lost_commits", "Commits refused since the session is another's")
        self.reconnects = counter("reconnects", "Connections to Redis opened anew")
        self.ignored = counter("control_ignored", "Control entries that were not understood")
        self.sessions = self._gauge("sessions", "Sessions held")
        self.parked = self._gauge("parked", "Sessions whose row is in host memory")
        self.waiting = Gauge(
            "slotstream_waiting",
            "Sessions that wait for a worker, as last seen (128 at most are looked at)",
            ["partition"],
            registry=self.registry,
        )
        self.inexact = self._gauge("inexact", "1 when this worker's bits differ from the app's")
        self.oldest = self._gauge(
            "oldest_checkpoint_seconds", "Age of the oldest state not checkpointed"
        )
        self.round_rows = Histogram(
            "slotstream_round_rows",
            "Frames a round",
            buckets=[4**k for k in range(9)],
            registry=self.registry,
        )

    def serve(self, port: int) -> None:
        """Answer scrapes on `port`, from a thread."""
        start_http_server(port, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"slotstream_{name}", text, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"slotstream_{name}", text, registry=self.registry)
