"""A worker's lease: a key that expires by Redis's clock, renewed while its loop makes progress."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence

from redis.exceptions import RedisError

from slotstream.endpoint import CONNECT_TIMEOUT_S, Endpoint
from slotstream.lines import Line
from slotstream.names import Keys

log = logging.getLogger(__name__)


def whereabouts() -> str:
    """Host and process id: the lease's value, for people and health checks."""
    return f"{socket.gethostname()} {os.getpid()}"


class Lease:
    """Renews `lease:<worker>` of each partition, from a thread, so that no compile starves it.

    The loop says that it makes progress by `beat`; one that has not for `stall_s` is stuck, and
    its lease runs out so that others can take its sessions.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        partitions: Sequence[Keys],
        worker: str,
        *,
        lease_s: float,
        stall_s: float,
    ) -> None:
        self.partitions, self.worker = partitions, worker
        self.lease_s, self.stall_s = lease_s, stall_s
        self._endpoint = endpoint
        self._beat = time.monotonic()
        self._lines: dict[int, Line] = {}
        self._failing: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        """Take the lease now (raises where Redis cannot be reached), then renew it."""
        for keys in self.partitions:
            self._renew(keys)
        self._thread.start()

    def beat(self) -> None:
        """The loop has made progress."""
        self._beat = time.monotonic()

    def stop(self) -> None:
        """Renew no more; the lease runs out by itself unless it is deleted."""
        self._stop.set()
        if not self._thread.is_alive():
            return
        self._thread.join(timeout=1.0)
        # It may wait for a Redis that is silent: a closed line ends that, and a thread that were
        # left behind could still write to the log while the interpreter goes.
        for line in list(self._lines.values()):
            line.close()
        self._thread.join(timeout=CONNECT_TIMEOUT_S)

    def _renew(self, keys: Keys) -> None:
        line = self._lines.get(keys.partition)
        if line is None:
            line = self._lines[keys.partition] = Line(self._endpoint.pool(keys.control))
        expires = ("PX", int(self.lease_s * 1000))
        # In `workers` first: whoever looks for the dead must find everyone who can own.
        answers = line.calls(
            [
                ("SADD", keys.workers, self.worker),
                ("SET", keys.lease(self.worker), whereabouts(), *expires),
            ]
        )
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer

    def _run(self) -> None:
        stalled = False
        while not self._stop.wait(self.lease_s / 4):
            if time.monotonic() - self._beat > self.stall_s:
                if not stalled:
                    log.error(
                        "the loop has made no progress for %.0f s; the lease is left to expire",
                        self.stall_s,
                    )
                stalled = True
                continue
            stalled = False
            for keys in self.partitions:
                self._try(keys)
        for line in self._lines.values():
            line.close()

    def _try(self, keys: Keys) -> None:
        """Renew one partition's lease; a failure is logged once an outage, not once a try.

        A line that was cut while it was idle is found so only now: the lease is renewed at once on
        a new one, since a quarter of it has passed already.
        """
        for tries_left in (1, 0):
            try:
                self._renew(keys)
                self._failing.discard(keys.partition)
                return
            except (RedisError, OSError) as error:
                if line := self._lines.pop(keys.partition, None):
                    line.close()
                self._endpoint.forget()
                if tries_left and keys.partition not in self._failing:
                    continue
                if keys.partition not in self._failing and not self._stop.is_set():
                    log.warning(
                        "partition %d: the lease cannot be renewed: %s", keys.partition, error
                    )
                self._failing.add(keys.partition)
                return
