"""The engine alone: what occupancy costs, and what rows in and rows out cost over the bare step."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import Ratio, ratio
from benchmarks.model import model
from slotstream_worker.engine.engine import Engine


def _engine(slots: int, row_counts: tuple[int, ...] | None = None) -> Engine:
    engine = Engine(model(), slots)
    engine.prepare(row_counts)
    engine.pool.admit(range(slots))
    frames = _frames(slots)
    engine.run(range(slots), frames)  # everyone has left rest
    return engine


def _frames(rows: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(rows, 10, 40)).astype(np.float32)


def occupancy() -> Iterator[Ratio]:
    """A round of 16 active among 1,024 open sessions against 16 among 16, same row counts."""
    many = _engine(1024)
    few = _engine(16, tuple(c for c in many.row_counts if c <= 16) or many.row_counts)
    frames = _frames(16)
    scattered = [int(k) for k in np.random.default_rng(2).permutation(1024)[:16]]
    yield ratio(
        "occupancy",
        "16 of 1,024",
        lambda: many.run(scattered, frames),
        "16 of 16",
        lambda: few.run(range(16), frames),
        inner=100,
    )


def engine() -> Iterator[Ratio]:
    """Whole rounds, rows in and rows out, against the bare jitted step at its best row count."""
    stream = model()
    step = jax.jit(stream.apply)
    best: tuple[float, int] | None = None
    for rows in (16, 64, 256, 1024):
        x = jnp.asarray(np.moveaxis(_frames(rows), 0, 1))
        _, state = step(stream.variables, None, x)
        jax.block_until_ready(step(stream.variables, state, x))
        timed = ratio(
            "",
            "",
            lambda s=state, x=x: jax.block_until_ready(step(stream.variables, s, x)),
            "",
            lambda: None,
            repeats=3,
            inner=10,
        )
        if best is None or timed.a_ms / rows < best[0]:
            best = (timed.a_ms / rows, rows)
    rows = best[1]
    x = jnp.asarray(np.moveaxis(_frames(rows), 0, 1))
    _, state = step(stream.variables, None, x)

    def bare() -> None:
        jax.block_until_ready(step(stream.variables, state, x))

    for slots in (256, 1024, 4096):
        served = _engine(slots)
        frames = _frames(slots)
        yield ratio(
            "engine",
            f"bare step, a row ({rows} rows)",
            bare,
            f"round of {slots:,}, a row",
            lambda e=served, f=frames: e.run(range(len(f)), f),
            inner=10,
            a_units=rows,
            b_units=slots,
        )
