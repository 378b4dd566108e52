"""The bare jitted step: the model alone, its rows on the device, nothing gathered or fetched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import Figure, Run, Times, clock, faster
from slotstream_worker import StreamModel
from slotstream_worker.engine.model import random_frames

ROW_COUNTS = (16, 64, 256, 1024, 4096)


class BareStep:
    """One step of `rows` rows that goes on from its own last state; `run` waits for it."""

    def __init__(self, model: StreamModel, rows: int) -> None:
        self.rows = rows
        self._variables, self._step = model.variables, jax.jit(model.apply)
        shape = (rows, *model.frame_shape)
        frames = random_frames(np.random.default_rng(0), shape, model.dtype)
        self._frames = jnp.moveaxis(jnp.asarray(frames), 0, 1)
        _, self._state = self._step(self._variables, None, self._frames)
        self.run()

    def run(self) -> None:
        """Advance every row by a frame."""
        outputs, self._state = self._step(self._variables, self._state, self._frames)
        jax.block_until_ready((outputs, self._state))

    @property
    def thing(self) -> Callable[[], float]:
        """Measures seconds a row."""
        return clock(self.run, self.rows)


def against(
    times: Times, name: str, step: BareStep, *, key: str, a: str, series: str, sessions: int
) -> Figure:
    """How fast the thing `name` is beside the bare step, which is called `bare`."""
    found = faster(times, name, "bare", key=key, a=a, b=f"bare step of {step.rows} rows")
    return found.at("engine", series, sessions)


def best(run: Run, model: StreamModel, row_counts: Sequence[int] = ()) -> BareStep:
    """The bare step at the row count that is cheapest a row, on this device."""
    counts = row_counts or run.pick(ROW_COUNTS, ROW_COUNTS[:3])
    steps = {str(rows): BareStep(model, rows) for rows in counts}
    times = run.alternate("the bare step", {name: one.thing for name, one in steps.items()})
    return steps[min(steps, key=lambda name: float(np.median(times[name])))]
