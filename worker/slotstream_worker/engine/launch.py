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
from slotstream_worker.engine.pool import Plan, Pool, Rows, gather_rows, is_ready

Outputs = dict[str, Any]
"""Arrays `[rows, frame, ...]` by the output's name."""


@dataclass
class Launched:
    """A launch under way: its outputs and new rows, which may still be being computed."""

    plan: Plan
    outputs: Outputs
    rows: Rows
    frames: int = 0
    """How many frames of each row it runs, where it may run several."""

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return is_ready(self.rows) and is_ready(self.outputs.values())

    def wait(self) -> dict[str, np.ndarray[Any, Any]]:
        """Outputs on the host, `[num_rows, frame, ...]`; raises what the launch raised.

        Of a launch of several frames a row, `[num_rows, frames, frame, ...]`.
        """
        # Rows too: nothing may be committed that could still fail. One by one: to wait for a tree
        # of arrays takes ten times as long.
        for array in (*self.outputs.values(), *self.rows):
            array.block_until_ready()
        part = (slice(self.plan.num_rows), *([slice(self.frames)] if self.frames else []))
        return {name: np.asarray(array)[part] for name, array in self.outputs.items()}


class Launcher:
    """The compiled step of one model, from rest and from the rows of a pool."""

    def __init__(self, model: StreamModel) -> None:
        self.model = model
        spec = model.spec

        # Rows first on the host (a row's bytes are then one run of memory), time first in the
        # model; the transposition is part of the compiled step.
        def sent(outputs: Any, steps: Any) -> Outputs:
            if model.pick is None:
                return {name: _second_first(a) for name, a in named(outputs).items()}
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
            variables: Any,
            arrays: Rows,
            indices: jax.Array,
            frames: jax.Array,
            steps: Any,
            count: jax.Array,
        ) -> tuple[Outputs, Rows]:
            def step(rows: Rows, frame: jax.Array) -> tuple[Outputs, Rows]:
                outputs, state = model.apply(
                    variables, spec.to_model(rows), jnp.moveaxis(frame, 0, 1)
                )
                return sent(outputs, steps), spec.from_model(state)

            def turn(k: jax.Array, held: tuple[Outputs, Rows]) -> tuple[Outputs, Rows]:
                frame = jax.lax.dynamic_index_in_dim(frames, k, axis=0, keepdims=False)
                outputs, rows = step(held[1], frame)
                place = jax.lax.dynamic_update_index_in_dim
                return {name: place(held[0][name], outputs[name], k, 0) for name in outputs}, rows

            rows, frames = [gather_rows(array, indices) for array in arrays], _second_first(frames)
            shapes, _ = jax.eval_shape(step, rows, frames[0])
            outputs = {
                name: jnp.zeros((len(frames), *one.shape), one.dtype)
                for name, one in shapes.items()
            }
            outputs, rows = jax.lax.fori_loop(0, count, turn, (outputs, rows))
            return {name: _second_first(array) for name, array in outputs.items()}, rows

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
        self,
        pool: Pool,
        plan: Plan,
        frames: np.ndarray[Any, Any],
        count: int,
        variables: Any = None,
    ) -> Launched:
        """Run several frames of each row in one launch.

        Args:
            pool: where the rows lie.
            plan: all of its real rows hold state.
            frames: `[rows, frames, frame, *sample_shape]`.
            count: how many of the frames of each row are run, the first of them. It is no part
                of what is compiled.
            variables: as for `launch`.
        """
        held = self.model.variables if variables is None else variables
        real = self._steps(len(frames), None)
        outputs, rows = self._advance_far(
            held, pool.arrays, plan.slot_indices, frames, real, np.int32(count)
        )
        return Launched(plan, outputs, rows, count)

    def _steps(self, rows: int, steps: Sequence[int] | None) -> np.ndarray[Any, Any] | None:
        """Real steps of each row, int32 `[rows]`; None where no pick asks for them."""
        if self.model.pick is None:
            return None
        real = np.full(rows, self.model.frame, np.int32)
        if steps is not None:
            real[: len(steps)] = steps
        return real


def _second_first(array: jax.Array) -> jax.Array:
    return jnp.moveaxis(array, 1, 0)
