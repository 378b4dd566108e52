"""Running a worker as a process: start, loop, signals, drain.

Order of a shutdown: claim no more, finish the round, publish and checkpoint, hand every session
back, end the lease. The lease goes last, since until then the sessions are this worker's.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from slotstream_worker.outage import Outage
from slotstream_worker.worker import Worker

log = logging.getLogger(__name__)


def serve(
    worker: Worker,
    stop: threading.Event,
    *,
    ready: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = lambda _count: None,
) -> None:
    """Run a worker until `stop` is set or it is ordered to drain; outages are waited out."""
    outage = Outage("Redis")
    while not outage.through(lambda: worker.prepare(progress)):
        if stop.wait(outage.wait_s):
            worker.close()
            return
    outage.over()
    if worker.config.metrics_port:
        worker.metrics.serve(worker.config.metrics_port)
    calm_collector()
    ready()
    try:
        while not (stop.is_set() or worker.done):
            worker.turn()
        worker.drain()
    finally:
        worker.close()


def calm_collector() -> None:
    """Have Python's garbage collector look at little, and seldom, as a worker does.

    What there is now stays; what comes and goes with each frame makes no cycles, and looking for
    them among all entries that wait took a third of the loop's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


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
