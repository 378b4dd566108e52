"""What `python examples/NAME.py` does: a Redis, a worker, a few sessions; then the comparison.

Each example hands over its model, some streams, and the direct call that a served session has to
equal: one call over the whole stream, at once, without slotstream.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from slotstream import Client
from slotstream.embedded import EmbeddedRedis
from slotstream_worker import StreamModel
from slotstream_worker.config import WorkerConfig
from slotstream_worker.service import serve
from slotstream_worker.worker import Worker

Direct = Callable[[Any], Any]
"""A whole stream `[steps, *sample_shape]` to its outputs `[steps, ...]`, an array or a mapping."""

TOLERANCE = 1e-5
"""Largest difference, relative to the largest output, that is put down to rounding: the direct call
is another compiled program, which sums in another order."""


def demonstrate(model: StreamModel, streams: Mapping[str, np.ndarray], direct: Direct) -> None:
    """Serve the streams, print a table of served against direct, exit with 1 where they differ.

    Args:
        model: what is served.
        streams: a session each, `[steps, *sample_shape]`; steps beyond whole frames are cut.
        direct: the call over a whole stream.
    """
    frames = {name: in_frames(model, stream) for name, stream in streams.items()}
    with EmbeddedRedis() as redis, working(model, redis.url), Client(redis.url) as client:
        replies = client.run(frames)
    table = Table(title=f"{model.name}: served sessions against one direct call each")
    for column in ("session", "frames", "replies", "largest output", "largest difference"):
        table.add_column(column, justify="left" if column == "session" else "right")
    agree = True
    for name, stream in frames.items():
        served = jax.tree.map(lambda *parts: np.stack(parts), *[r.output for r in replies[name]])
        expected = picked(model, direct(stream.reshape(-1, *model.sample_shape)), len(stream))
        scale, difference = farthest(served, expected)
        agree &= len(replies[name]) == len(stream) and difference <= TOLERANCE * scale
        row = len(stream), len(replies[name]), f"{scale:.4g}", f"{difference:.2g}"
        table.add_row(name, *map(str, row))
    Console().print(table)
    print("they agree" if agree else "THEY DIFFER")
    if not agree:
        sys.exit(1)


def in_frames(model: StreamModel, stream: np.ndarray) -> np.ndarray:
    """A stream `[steps, ...]` cut into whole frames `[frames, frame, ...]` of the model's dtype."""
    count = len(stream) // model.frame
    return np.asarray(stream[: count * model.frame], model.dtype).reshape(count, *model.frame_shape)


def picked(model: StreamModel, outputs: Any, frames: int) -> Any:
    """What the replies carry of a direct call's outputs `[steps, ...]`: `[frames, ...]`."""
    cut = jax.tree.map(lambda y: np.asarray(y).reshape(frames, model.frame, *y.shape[1:]), outputs)
    if model.pick is None:
        return cut
    act, steps = model.pick.act, jnp.int32(model.frame)  # all of a frame's steps are real
    return jax.tree.map(np.asarray, jax.vmap(lambda one: act(one, steps))(cut))


def farthest(served: Any, expected: Any) -> tuple[float, float]:
    """The largest magnitude expected, and the largest difference from it."""
    pairs = list(zip(jax.tree.leaves(served), jax.tree.leaves(expected), strict=True))
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return 0.0, float("inf")
    wide = [(a.astype(np.complex128), b.astype(np.complex128)) for a, b in pairs]
    return (
        max(float(np.max(np.abs(b), initial=0.0)) for _, b in wide),
        max(float(np.max(np.abs(a - b), initial=0.0)) for a, b in wide),
    )


@contextmanager
def working(model: StreamModel, url: str) -> Iterator[None]:
    """A worker of the model in a thread of this process; drained afterwards."""
    worker = Worker(WorkerConfig(redis=url, slots=16, row_counts=(8,)), model)
    stop, ready, failures = threading.Event(), threading.Event(), []

    def run() -> None:
        try:
            serve(worker, stop, ready=ready.set)
        except BaseException as error:
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="worker")
    thread.start()
    try:
        ready.wait()
        if not failures:
            yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]
