"""What the tests of weights share: models of several dtypes, ways to cut them into shards."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from slotstream import Client
from slotstream_worker import StreamModel, models
from slotstream_worker.config import WorkerConfig
from slotstream_worker.engine.engine import Engine
from slotstream_worker.metrics import Metrics
from slotstream_worker.weights import Piece, publish
from slotstream_worker.weights.gauges import Gauges
from slotstream_worker.weights.layout import Layout
from slotstream_worker.weights.receiver import Receiver

Array = np.ndarray[Any, Any]
Tree = dict[str, Any]


def mixed(seed: int = 0) -> Tree:
    """Variables of many shapes and dtypes, as a trainer has them."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return rng.normal(0.3, 0.6, shape).astype(np.float32)

    return {
        "params": {
            "embed": {"kernel": normal(33, 20)},
            "conv": {"kernel": normal(3, 3, 4, 10).astype(np.float16)},
            "head": {"kernel": normal(20, 14).astype(ml_dtypes.bfloat16), "bias": normal(14)},
            "scale": normal(),
            "empty": normal(0, 4),
        },
        "batch_stats": {"count": rng.integers(0, 2**40, 9).astype(np.int32),
                        "seen": rng.random(5) < 0.5},
    }  # fmt: skip


def cuts(size: int, parts: int) -> list[tuple[int, int]]:
    """`size` cut into `parts` runs, not all equal; some may be empty."""
    edges = [round(size * (k / parts) ** 1.3) for k in range(parts + 1)]
    return [(a, b - a) for a, b in pairwise(edges)]


def rows(array: Array, rank: int, ranks: int) -> list[Piece]:
    """The rank's run of the first axis."""
    return _along(array, 0, rank, ranks)


def columns(array: Array, rank: int, ranks: int) -> list[Piece]:
    """The rank's run of the last axis."""
    return _along(array, array.ndim - 1, rank, ranks)


def grid(array: Array, rank: int, ranks: int) -> list[Piece]:
    """The rank's cell of a grid over the first and the last axis."""
    if array.ndim < 2:
        return rows(array, rank, ranks)
    down = {1: 1, 2: 1, 4: 2, 7: 1}[ranks]
    across = ranks // down
    r, c = divmod(rank, across)
    start, count = cuts(array.shape[0], down)[r]
    left, width = cuts(array.shape[-1], across)[c]
    part = array[start : start + count, ..., left : left + width]
    return [Piece(part, array.shape, (start, *[0] * (array.ndim - 2), left))]


def replicated(array: Array, rank: int, ranks: int) -> list[Piece]:
    """All of it, from every rank."""
    return [Piece(array, array.shape, (0,) * array.ndim)]


SHARDINGS: dict[str, Callable[[Array, int, int], list[Piece]]] = {
    "rows": rows, "columns": columns, "grid": grid, "replicated": replicated,
}  # fmt: skip


def _along(array: Array, axis: int, rank: int, ranks: int) -> list[Piece]:
    if array.ndim == 0 or not array.size:
        return replicated(array, rank, ranks) if rank == 0 else []
    start, count = cuts(array.shape[axis], ranks)[rank]
    if not count:
        return []
    index = (*[slice(None)] * axis, slice(start, start + count))
    offset = [0] * array.ndim
    offset[axis] = start
    # Strided on purpose: a rank's view need not be contiguous.
    return [Piece(array[index], array.shape, tuple(offset))]


def share(tree: Tree, how: str, rank: int, ranks: int) -> Any:
    """What a rank owns of a tree; a leaf it owns nothing of is left out."""
    found: Tree = {}
    for name, value in tree.items():
        part = (
            share(value, how, rank, ranks)
            if isinstance(value, dict)
            else SHARDINGS[how](value, rank, ranks)
        )
        if part:
            found[name] = part
    return found


def publish_ranks(url: str, tree: Tree, version: str, how: str, ranks: int, **kwargs: Any) -> None:
    """Publish from so many ranks, each in a thread with a client of its own."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with Client(url, patience_s=10) as client:
                publish(client, share(tree, how, rank, ranks), version=version, rank=rank,
                        ranks=ranks, **kwargs)  # fmt: skip
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


def holder(variables: Tree) -> StreamModel:
    """A model that holds such variables and uses none of them for much."""

    def step(weights: Any, carry: Any, frames: jax.Array) -> Any:
        total = sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(weights))
        carry = carry + frames.sum(0)
        return carry, (frames + carry[None]) * total

    return models.carry(step, lambda batch: jnp.zeros((batch, 2)), variables, frame=3,
                        sample_shape=(2,), name="holder")  # fmt: skip


def zeros_like(tree: Tree) -> Tree:
    return {k: zeros_like(v) if isinstance(v, dict) else np.zeros_like(v) for k, v in tree.items()}


class Bench:
    """A receiver without a worker, whose passes the test makes."""

    def __init__(self, url: str, model: StreamModel, name: str = "w", **settings: Any) -> None:
        self.engine = Engine(model, 4)
        self.metrics = Metrics()
        config = WorkerConfig(redis=url, name=name, slots=4, row_counts=(4,), **settings)
        self.receiver = Receiver(config, self.engine, Gauges(self.metrics.registry))

    def look(self) -> list[str]:
        """One pass; the versions that came."""
        self.receiver.look()
        return [version for version, _ in self.receiver.take()]

    def variables(self, version: str) -> Any:
        return self.receiver.holdings._held[version].variables

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"slotstream_weights_{name}", labels) or 0.0

    def close(self) -> None:
        if self.receiver._server:
            self.receiver._server.stop()
        self.receiver.link.close()


def assert_bits(found: Any, wanted: Any) -> None:
    """Equal in every bit, dtypes and shapes included."""
    a, b = Layout.of(jax.tree.map(jnp.asarray, found)), jax.tree.leaves(wanted)
    for leaf, x, y in zip(a.leaves, jax.tree.leaves(found), b, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), leaf.name
        assert x.tobytes() == y.tobytes(), leaf.name


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def variant(model: StreamModel, seed: int) -> Tree:
    """Other weights for a model: each leaf moved by noise of its own size."""
    rng = np.random.default_rng(seed)

    def moved(leaf: Any) -> Array:
        value = np.asarray(leaf)
        noise = rng.normal(size=value.shape) * (0.3 * np.abs(value).mean() + 0.05)
        return np.asarray(value + noise, value.dtype)

    return jax.tree.map(moved, model.variables)


class Oracle:
    """What each named version computes from each session's state: a calm engine, frame by frame."""

    def __init__(self, model: StreamModel, versions: dict[str, Tree], rows: int = 4) -> None:
        self.engine = Engine(model, 64)
        self.engine.prepare((rows,))
        self.engine.versions[model.weights] = model.variables
        for name, tree in versions.items():
            self.engine.versions[name] = jax.tree.map(jnp.asarray, tree)

    def wrong(self, frames: Any, replies: Any, *, reset: frozenset[str] = frozenset()) -> list[int]:
        """Places of the replies that differ from their version's own; `reset`: versions at which
        a session starts from rest."""
        pool, found, before = self.engine.pool, [], None
        pool.admit(["s"])
        for k, (frame, reply) in enumerate(zip(frames, replies, strict=True)):
            if reply.weights != before and before is not None and reply.weights in reset:
                pool.reset("s")
            before = reply.weights
            (ran,) = self.engine.run(["s"], np.asarray(frame)[None], weights=before)
            output = reply.output if isinstance(reply.output, dict) else {"output": reply.output}
            if any(not np.array_equal(output[n], a[0]) for n, a in ran.outputs.items()):
                found.append(k)
        pool.release(["s"])
        return found
