"""A worker and its sessions in this process, turned by hand, so that it can be measured in turn."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.backlog import Backlog
from benchmarks.model import model
from slotstream import Client
from slotstream_worker import StreamModel
from slotstream_worker.config import WorkerConfig
from slotstream_worker.engine.model import random_frames
from slotstream_worker.service import calm_collector
from slotstream_worker.worker import Worker

_PATIENCE_S = 300.0


class Hosting:
    """A worker with `sessions` open sessions, of which the first `active` get frames.

    `settings` are the worker's own (`WorkerConfig`). Its lease is long: it stands still while
    others are measured.
    """

    def __init__(
        self,
        url: str,
        app: str,
        sessions: int,
        *,
        active: int = 0,
        served: StreamModel | None = None,
        **settings: Any,
    ) -> None:
        served = served or model()
        settings = {"slots": sessions, "lease_s": 600.0, "stall_s": 3600.0, **settings}
        self.worker = Worker(WorkerConfig(redis=url, app=app, **settings), served)
        self.worker.prepare()
        self.names = [f"s{k}" for k in range(sessions)]
        with Client(url, app) as client:
            client.open_many(self.names, new=True)
        self.turn_until(lambda: value_of(self.worker.metrics.sessions) >= sessions)
        self.backlog = Backlog(url, app, self.names[: active or sessions], random_frames_of(served))

    @property
    def answered(self) -> int:
        """Replies published so far."""
        return sum(shard.publisher.published for shard in self.worker.shards)

    def turn_until(self, done: Callable[[], bool]) -> None:
        """Turn the worker until `done`."""
        deadline = time.monotonic() + _PATIENCE_S
        while not done():
            self.worker.turn()
            if time.monotonic() > deadline:
                raise TimeoutError("the worker did not get there")

    def work_off(self, deep: int) -> float:
        """Fill every active session with `deep` frames; seconds a frame until all are answered.

        Python's garbage collector is set as a worker's process sets it, and afterwards as it was.
        """
        total = self.backlog.fill(deep)
        target = self.answered + total
        usual = gc.get_threshold()
        calm_collector()
        start = time.perf_counter()
        self.turn_until(lambda: self.answered >= target)
        passed = time.perf_counter() - start
        gc.set_threshold(*usual)
        gc.unfreeze()
        self.backlog.trim()
        return passed / total

    def work_for(self, least_s: float, deep: int, *, trim_inbox: bool = False) -> float:
        """Fill and work off until `least_s` seconds were timed; seconds a frame.

        Args:
            least_s: how long.
            deep: frames a session a filling.
            trim_inbox: delete frames once they are answered (where no checkpoint ever does).
        """
        passed = frames = 0.0
        while passed < least_s:
            taken = self.work_off(deep)
            frames += deep * len(self.backlog.sessions)
            passed += taken * deep * len(self.backlog.sessions)
            if trim_inbox:
                self.backlog.trim("in")
        return passed / frames

    def settle(self, *, saved: bool = True) -> None:
        """Turn, untimed, until what is overdue is done, and every checkpoint written if `saved`."""
        for _ in range(4):
            self.worker.turn()
        if saved:
            self.turn_until(lambda: value_of(self.worker.metrics.oldest) == 0.0)

    def close(self) -> None:
        """Let the worker go, without handing anything back: its Redis goes too."""
        self.backlog.close()
        self.worker.close()


def random_frames_of(served: StreamModel) -> Any:
    """Different frames of a model; few of them where they are large."""
    count = 16 if math.prod(served.frame_shape) < 16_384 else 2
    rng = np.random.default_rng(1)
    return random_frames(rng, (count, *served.frame_shape), served.dtype)


def value_of(metric: Any) -> float:
    """What a counter or gauge stands at."""
    return float(next(iter(metric.collect())).samples[0].value)
