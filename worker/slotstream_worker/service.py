"""Running a worker as a process: start, loop, outages waited out, signals, drain.

Order of a shutdown: claim no more, finish the round, publish and checkpoint, hand every session
back, end the lease. The lease goes last, since until then the sessions are this worker's.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import redis
from redis.exceptions import ResponseError

from slotstream_worker.worker import Worker

log = logging.getLogger(__name__)

# Conditions of Redis that pass by themselves: nothing is lost by waiting.
_PASSING = (
    "LOADING",
    "READONLY",
    "OOM",
    "MISCONF",
    "MASTERDOWN",
    "NOREPLICAS",
    "BUSY",
    "CLUSTERDOWN",
    "TRYAGAIN",
)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0


def serve(
    worker: Worker,
    stop: threading.Event,
    *,
    ready: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = lambda _count: None,
) -> None:
    """Run a worker until `stop` is set, then drain it. Outages of Redis are waited out."""
    outage = _Outage(stop)
    while not outage.passed(lambda: worker.prepare(progress)):
        if stop.is_set():
            return
    if worker.config.metrics_port:
        worker.metrics.serve(worker.config.metrics_port)
    ready()
    broken = False
    while not stop.is_set():
        broken = not outage.passed(worker.connect if broken else worker.turn)
    drained = _Outage(threading.Event(), give_up_s=worker.config.lease_s)
    while not drained.passed(worker.connect if broken else worker.drain):
        broken = True
    if broken:
        drained.passed(worker.drain)


class _Outage:
    """Runs things that need Redis; logs an outage once, and waits longer each time."""

    def __init__(self, stop: threading.Event, give_up_s: float = float("inf")) -> None:
        self._stop, self._give_up_s = stop, give_up_s
        self._wait_s, self._since = _FIRST_WAIT_S, 0.0

    def passed(self, act: Callable[[], None]) -> bool:
        """Whether `act` went through; after a failure this returns once a wait is over."""
        try:
            act()
        except (redis.ConnectionError, redis.TimeoutError, ResponseError, OSError) as error:
            if (
                isinstance(error, ResponseError)
                and not isinstance(error, redis.ConnectionError)
                and not str(error).startswith(_PASSING)
                and not isinstance(error, _PASSING_TYPES)
            ):
                raise
            if not self._since:
                self._since = time.monotonic()
                log.warning("Redis: %s; waiting", error)
            elif time.monotonic() - self._since > self._give_up_s:
                raise
            self._stop.wait(self._wait_s)
            self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
            return False
        if self._since:
            log.warning("Redis is back after %.1f s", time.monotonic() - self._since)
        self._wait_s, self._since = _FIRST_WAIT_S, 0.0
        return True


# The client library turns some conditions into types of their own, without the prefix.
_PASSING_TYPES = (redis.BusyLoadingError, redis.ReadOnlyError, redis.OutOfMemoryError)


def install_signals(stop: threading.Event) -> None:
    """SIGTERM and SIGINT drain; a second one aborts at once, with exit status 1."""

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if stop.is_set():
            os.write(2, b"slotstream: aborted; the sessions are taken when the lease has ended\n")
            os._exit(1)
        stop.set()
        name = signal.Signals(number).name
        os.write(2, f"slotstream: {name}: draining; once more to abort\n".encode())

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
