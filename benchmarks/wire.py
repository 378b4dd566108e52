"""The worker through Redis, its backlog preloaded, against the same frames through its engine."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Ratio
from benchmarks.model import model
from slotstream import Client
from slotstream.embedded import EmbeddedRedis
from slotstream_worker.config import WorkerConfig
from slotstream_worker.worker import Worker

FRAMES = 20


def wire() -> Iterator[Ratio]:
    for sessions in (64, 256, 1024):
        yield _wire(sessions)


def _wire(sessions: int, repeats: int = 5) -> Ratio:
    rng = np.random.default_rng(0)
    frames = rng.normal(size=(sessions, 10, 40)).astype(np.float32)
    with EmbeddedRedis() as redis, Client(redis.url) as client:
        worker = Worker(WorkerConfig(redis=redis.url, slots=sessions), model())
        worker.prepare()
        names = [f"s{k}" for k in range(sessions)]
        handles = client.open_many(names, new=True)
        while len(worker.host.hosted) < sessions:
            worker.turn()
        engine, pairs = worker.engine, []
        for _ in range(repeats):
            _preload(client, handles, frames)
            before = worker.metrics.replies._value.get()
            start = time.perf_counter()
            while worker.metrics.replies._value.get() - before < sessions * FRAMES:
                worker.turn()
            through = (time.perf_counter() - start) / (sessions * FRAMES)
            start = time.perf_counter()
            for _ in range(FRAMES):
                engine.run(names, frames)
            pairs.append((through, (time.perf_counter() - start) / (sessions * FRAMES)))
        worker.drain()
        worker.close()
    times = np.asarray(pairs)
    low, middle, high = np.percentile(times[:, 1] / times[:, 0], [25, 50, 75])
    through, alone = 1e3 * np.median(times, axis=0)
    return Ratio(
        "wire",
        f"engine alone, a frame ({sessions:,} sessions)",
        "through Redis, a frame",
        float(alone),
        float(through),
        float(middle),
        float(low),
        float(high),
        repeats,
    )


def _preload(client: Client, handles: list, frames: np.ndarray) -> None:
    raw = [client.app.encode(frame) for frame in frames]
    for _ in range(FRAMES):
        client.link.calls(
            [
                ("XADD", handle.inbox, "*", "frame", frame)
                for handle, frame in zip(handles, raw, strict=True)
            ]
        )
