"""The worker's settings, checked once and passed whole."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from slotstream.codec import MAX_FRAME_BYTES
from slotstream.names import check_app, check_worker


@dataclass(frozen=True)
class WorkerConfig:
    """Settings of one worker process. Raises `ValueError` where they make no sense.

    Attributes:
        redis: URL of the server.
        app: prefix of all keys.
        slots: sessions whose state is on the device at a time.
        max_sessions: sessions the worker holds, parked ones among them; 0 for four times the slots.
        idle_timeout_s: closes a session without frames for so long; 0 for never.
        max_attempts: owners that may die with a session's entry unanswered before the session is
            set aside.
        rebalance: hand sessions on by itself where other workers hold clearly fewer.
        partitions: the partitions it serves; none for all of them.
        partition_count: how many the app has; 0 for what its first worker chose.
        name: identity that a restart keeps; without one, a new one each time.
        checkpoint_interval_s: how often a session's state goes to Redis while it moves.
        checkpoint_bytes_per_s: how much state a second, at most.
        lease_s: how long the worker counts as alive without a sign.
        stall_s: how long the loop may make no progress before its lease is left to expire.
        sweep_s: how often what Redis says is compared with what is held.
        reply_retention: replies an open session keeps.
        reply_ttl_s: how long the replies of a closed session stay.
        max_frame_bytes: the largest frame taken.
        read_ahead: entries read of a session at a time, when a quarter of them wait or fewer.
        round_wait_s: how long a round waits for more sessions to have a frame; 0 for not at all.
        round_rows: sessions with which a round waits no longer; 0 for what fills a launch.
        finite: refuse frames with NaN or infinities.
        allow_inexact: serve though the probe's digest differs from the app's.
        allow_eviction: serve though Redis has this maxmemory-policy, which may delete sessions.
        row_counts: launch with these; by default chosen by measuring.
        compile_cache: folder that keeps compiled programs from one start to the next.
        metrics_port: serve Prometheus metrics there; 0 for none.
        weights_listen: HOST:PORT where this worker serves versions it holds to others; "" for not.
        staging_bytes: host memory that a version on its way in may take; 0 for no limit.
        resident_versions: versions on the device at a time, where sessions are pinned to theirs.
        canary: an .npz of recorded frames that every version must answer well.
    """

    redis: str = "redis://localhost:6379/0"
    app: str = "slotstream"
    slots: int = 1024
    max_sessions: int = 0
    idle_timeout_s: float = 0.0
    max_attempts: int = 5
    rebalance: bool = False
    partitions: frozenset[int] = frozenset()
    partition_count: int = 0
    name: str = ""
    checkpoint_interval_s: float = 1.0
    checkpoint_bytes_per_s: float = 64 * 2**20
    lease_s: float = 10.0
    stall_s: float = 120.0
    sweep_s: float = 5.0
    reply_retention: int = 10_000
    reply_ttl_s: float = 3600.0
    max_frame_bytes: int = MAX_FRAME_BYTES
    read_ahead: int = 16
    round_wait_s: float = 0.0
    round_rows: int = 0
    finite: bool = False
    allow_inexact: bool = False
    allow_eviction: str = ""
    row_counts: tuple[int, ...] = ()
    compile_cache: Path | None = None
    metrics_port: int = 0
    weights_listen: str = ""
    staging_bytes: int = 0
    resident_versions: int = 2
    canary: Path | None = None
    nonce: str = field(default_factory=lambda: secrets.token_hex(4))

    def __post_init__(self) -> None:
        check_app(self.app)
        if self.name:
            check_worker(self.name)
        if self.partition_count and self.partitions - set(range(self.partition_count)):
            raise ValueError(
                f"partitions are 0 to {self.partition_count - 1}, got {sorted(self.partitions)}"
            )
        if self.max_attempts < 3:
            raise ValueError(
                f"max_attempts is at least 3 (two deaths in company, and one alone), "
                f"got {self.max_attempts}"
            )
        for name in ("slots", "reply_retention", "read_ahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
        for name in (
            "checkpoint_interval_s",
            "lease_s",
            "sweep_s",
            "stall_s",
            "reply_ttl_s",
            "checkpoint_bytes_per_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is more than 0, got {getattr(self, name)}")
        if self.round_wait_s < 0 or self.round_rows < 0:
            raise ValueError(
                "round_wait_s and round_rows are 0 or more, "
                f"got {self.round_wait_s} and {self.round_rows}"
            )
        if self.resident_versions < 2 or self.staging_bytes < 0:
            raise ValueError(
                "resident_versions is 2 or more (the old one and the new), and staging_bytes 0 or "
                f"more, got {self.resident_versions} and {self.staging_bytes}"
            )
        host, colon, port = self.weights_listen.rpartition(":")
        if self.weights_listen and not (host and colon and port.isdigit()):
            raise ValueError(f"weights_listen is HOST:PORT, got {self.weights_listen!r}")
        if any(count < 1 for count in self.row_counts):
            raise ValueError(f"row counts are 1 or more, got {self.row_counts}")

    def serves(self, partition: int) -> bool:
        """Whether the worker serves that partition."""
        return not self.partitions or partition in self.partitions

    @property
    def worker(self) -> str:
        """What the process is called in Redis: `<name>.<nonce>`, new for every process."""
        return f"{self.name or 'w' + self.nonce}.{self.nonce}"
