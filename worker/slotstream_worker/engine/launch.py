"""Launches: one call of the compiled step over a fixed number of rows.

A launch gathers the rows its plan names, runs the model, and returns the outputs and the new
rows; it does not change the pool, so one that fails leaves every row as it was. Rows at rest
and rows that continue go in launches of their own, so nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slotstream_worker.engine.model import StreamModel, named
from slotstream_worker.engine.pool import Plan, Pool, Rows, gather_rows

Outputs = dict[str, Any]
"""Arrays `[rows, frame, ...]` by the output's name."""


@dataclass
class Launched:
    """A launch under way: its outputs and new rows, which may still be being computed."""

    plan: Plan
    outputs: Outputs
    rows: Rows

    def wait(self) -> dict[str, np.ndarray[Any, Any]]:
        """Outputs on the host, `[num_rows, frame, ...]`; raises what the launch raised."""
        # Rows too: nothing may be committed that could still fail.
        jax.block_until_ready((self.outputs, self.rows))
        count = self.plan.num_rows
        return {name: np.asarray(array)[:count] for name, array in self.outputs.items()}


class Launcher:
    """The compiled step of one model, from rest and from the rows of a pool."""

    def __init__(self, model: StreamModel) -> None:
        self.model = model
        spec = model.spec

        # Rows first on the host (a row's bytes are then one run of memory), time first in the
        # model; the transposition is part of the compiled step.
        def sent(outputs: Any, steps: Any) -> Outputs:
            if model.pick is None:
                return _second_first(named(outputs))
            return named(jax.vmap(model.pick.act, in_axes=(1, 0))(outputs, steps))

        def begin(variables: Any, frames: jax.Array, steps: Any) -> tuple[Outputs, Rows]:
            outputs, state = model.apply(variables, None, jnp.moveaxis(frames, 0, 1))
            return sent(outputs, steps), spec.from_model(state)

        def advance(
            variables: Any, arrays: Rows, indices: jax.Array, frames: jax.Array, steps: Any
        ) -> tuple[Outputs, Rows]:
            state = spec.to_model([gather_rows(array, indices) for array in arrays])
            outputs, state = model.apply(variables, state, jnp.moveaxis(frames, 0, 1))
            return sent(outputs, steps), spec.from_model(state)

        def advance_far(
            variables: Any, arrays: Rows, indices: jax.Array, frames: jax.Array, steps: Any
        ) -> tuple[Outputs, Rows]:
            def step(state: Any, frame: jax.Array) -> tuple[Any, Outputs]:
                outputs, state = model.apply(variables, state, jnp.moveaxis(frame, 0, 1))
                return state, sent(outputs, steps)

            state = spec.to_model([gather_rows(array, indices) for array in arrays])
            state, outputs = jax.lax.scan(step, state, jnp.moveaxis(frames, 1, 0))
            return _second_first(outputs), spec.from_model(state)

        self._begin, self._advance = jax.jit(begin), jax.jit(advance)
        self._advance_far = jax.jit(advance_far)

    def launch(
        self,
        pool: Pool,
        plan: Plan,
        frames: np.ndarray[Any, Any],
        steps: Sequence[int] | None = None,
        variables: Any = None,
    ) -> Launched:
        """Run one launch; returns at once where the device computes in the background.

        Args:
            pool: where the rows lie.
            plan: all of its real rows are at rest, or all hold state.
            frames: `[rows, frame, *sample_shape]`.
            steps: how many of each frame's steps are real; all of them by default.
            variables: of the model's own shapes and dtypes, which compiles nothing anew; by
                default those it was made with.
        """
        held = self.model.variables if variables is None else variables
        real = self._steps(len(frames), steps)
        if plan.has_state[0]:
            outputs, rows = self._advance(held, pool.arrays, plan.slot_indices, frames, real)
        else:
            outputs, rows = self._begin(held, frames, real)
        return Launched(plan, outputs, rows)

    def launch_far(
        self, pool: Pool, plan: Plan, frames: np.ndarray[Any, Any], variables: Any = None
    ) -> Launched:
        """Run several frames of each row in one launch.

        Args:
            pool: where the rows lie.
            plan: all of its real rows hold state.
            frames: `[rows, frames, frame, *sample_shape]`; so are the outputs.
            variables: as for `launch`.
        """
        held = self.model.variables if variables is None else variables
        real = self._steps(len(frames), None)
        outputs, rows = self._advance_far(held, pool.arrays, plan.slot_indices, frames, real)
        return Launched(plan, outputs, rows)

    def _steps(self, rows: int, steps: Sequence[int] | None) -> np.ndarray[Any, Any] | None:
        """Real steps of each row, int32 `[rows]`; None where no pick asks for them."""
        if self.model.pick is None:
            return None
        real = np.full(rows, self.model.frame, np.int32)
        if steps is not None:
            real[: len(steps)] = steps
        return real


def _second_first(arrays: Outputs) -> Outputs:
    return {name: jnp.moveaxis(array, 1, 0) for name, array in arrays.items()}
