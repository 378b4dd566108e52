"""Functions of one example: no batch axis in state or frames; they are mapped over sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from slotstream_worker.engine.model import SampleShape, StreamModel
from slotstream_worker.engine.models.carry import carry
from slotstream_worker.engine.picks import Pick
from slotstream_worker.engine.state import Tree

Step = Callable[[Tree, Tree, Any], tuple[Tree, Any]]


def example(
    step: Step,
    initial_state: Tree,
    variables: Tree,
    *,
    frame: int,
    sample_shape: SampleShape,
    dtype: Any = "float32",
    outputs: Pick = "all",
    key: str = "",
    seed: int = 0,
    per_step: bool = False,
    name: str | None = None,
) -> StreamModel:
    """Serve a function that knows one example only, as most of JAX's own style do.

    State leaves may be of any shape and dtype: scalars (a flag, a counter), complex numbers, and
    None.

    Args:
        step: `step(variables, state, frames) -> (state, outputs)` with frames
            `[frame, *sample_shape]` and outputs `[frame, ...]`; with `per_step`, one time step
            `[*sample_shape]` in and one out.
        initial_state: the state that a session starts from.
        variables: any tree of arrays; the weights.
        frame: time steps a frame.
        sample_shape: shape of one time step.
        dtype: dtype of the frames.
        outputs: what a reply carries, see `engine.picks`.
        key: the leaf of the state that is a random key (uint32 `[2]`, `jax.random.key_data`), by
            its names with dots between; each session starts from a key of its own.
        seed: what the sessions' keys are drawn from, with their ids.
        per_step: `step` takes one time step; it is scanned over the frame.
        name: what messages call the model; the function's name by default.

    Raises:
        CannotStream: the function cannot be served, with the reason.
    """
    one = jax.tree.map(jnp.asarray, initial_state)

    def start(batch: int) -> Tree:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, *leaf.shape)), one)

    def over_frame(weights: Tree, state: Tree, frames: Any) -> tuple[Tree, Any]:
        if not per_step:
            return step(weights, state, frames)
        return jax.lax.scan(lambda s, x: step(weights, s, x), state, frames)

    return carry(
        jax.vmap(over_frame, in_axes=(None, 0, 1), out_axes=(0, 1)),
        start,
        variables,
        frame=frame,
        sample_shape=sample_shape,
        dtype=dtype,
        outputs=outputs,
        key=key,
        seed=seed,
        name=name or str(getattr(step, "__name__", type(step).__name__)),
    )
