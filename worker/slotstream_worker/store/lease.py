"""A worker's lease: a key that expires by Redis's clock, renewed while its loop makes progress."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time

import redis
from redis.exceptions import RedisError

from slotstream.lines import Line
from slotstream.names import Keys

log = logging.getLogger(__name__)


def whereabouts() -> str:
    """Host and process id: the lease's value, for people and health checks."""
    return f"{socket.gethostname()} {os.getpid()}"


class Lease:
    """Renews `lease:<worker>` from a thread of its own, so that a compile does not starve it.

    The loop says that it makes progress by `beat`; one that has not for `stall_s` is stuck, and
    its lease runs out so that others can take its sessions.
    """

    def __init__(
        self, pool: redis.ConnectionPool, keys: Keys, worker: str, *, lease_s: float, stall_s: float
    ) -> None:
        self.keys, self.worker, self.lease_s, self.stall_s = keys, worker, lease_s, stall_s
        self._pool = pool
        self._beat = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        """Take the lease now (raises where Redis cannot be reached), then renew it."""
        line = Line(self._pool)
        try:
            self._renew(line)
        finally:
            line.close()
        self._thread.start()

    def beat(self) -> None:
        """The loop has made progress."""
        self._beat = time.monotonic()

    def stop(self) -> None:
        """Renew no more; the lease runs out by itself unless `release` ends it."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def release(self, line: Line) -> None:
        """End the lease at once; the worker owns nothing any more."""
        self.stop()
        line.calls(
            [("DEL", self.keys.lease(self.worker)), ("SREM", self.keys.workers, self.worker)]
        )

    def _renew(self, line: Line) -> None:
        # In `workers` first: whoever looks for the dead must find everyone who can own.
        answers = line.calls(
            [
                ("SADD", self.keys.workers, self.worker),
                (
                    "SET",
                    self.keys.lease(self.worker),
                    whereabouts(),
                    "PX",
                    int(self.lease_s * 1000),
                ),
            ]
        )
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer

    def _run(self) -> None:
        line: Line | None = None
        failing = False
        while not self._stop.wait(self.lease_s / 4):
            if time.monotonic() - self._beat > self.stall_s:
                log.error(
                    "the loop has made no progress for %.0f s; the lease is left to expire",
                    self.stall_s,
                )
                continue
            try:
                line = line or Line(self._pool)
                self._renew(line)
                failing = False
            except (RedisError, OSError) as error:
                if not failing:  # once an outage, not once a try
                    log.warning("the lease cannot be renewed: %s", error)
                failing = True
                if line:
                    line.close()
                line = None
        if line:
            line.close()
