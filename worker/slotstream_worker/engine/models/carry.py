"""Plain functions that are handed their state and hand it on: RNN cells, scans, filters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from slotstream_worker.engine.building import build
from slotstream_worker.engine.errors import CannotStream
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.engine.state import Tree

Step = Callable[[Tree, Tree, jax.Array], tuple[Tree, Any]]


def carry(
    step: Step,
    initial_carry: Callable[[int], Tree] | Tree,
    variables: Tree,
    *,
    frame: int,
    sample_shape: tuple[int, ...],
    dtype: Any = "float32",
    name: str | None = None,
) -> StreamModel:
    """Serve a function with an explicit carry.

    Args:
        step: `step(variables, carry, frames) -> (carry, outputs)`, with frames
            `[frame, batch, *sample_shape]` and outputs `[frame, batch, ...]`, one array or a
            mapping of names to arrays.
        initial_carry: the carry a session starts from: a function of the batch size, or the
            carry of one session, each leaf `[1, ...]` (as a cell's `initialize_carry` gives for
            an input of `(1, features)`).
        variables: any tree of arrays; the weights.
        frame: time steps a frame.
        sample_shape: shape of one time step of one session.
        dtype: dtype of the frames.
        name: what messages call the model; the function's name by default.

    Raises:
        CannotStream: the function cannot be served, with the reason.
    """
    called = name or str(getattr(step, "__name__", type(step).__name__))
    start = initial_carry if callable(initial_carry) else _repeated(called, initial_carry)

    def apply(weights: Tree, state: Tree | None, frames: jax.Array) -> tuple[Any, Tree]:
        before = start(frames.shape[1]) if state is None else state
        after, outputs = step(weights, before, frames)
        return outputs, after

    return build(called, apply, variables, frame=frame, sample_shape=sample_shape, dtype=dtype)


def _repeated(name: str, one: Tree) -> Callable[[int], Tree]:
    """The carry of one session, repeated along its leading axis."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(one):
        if jnp.shape(leaf)[:1] != (1,):
            raise CannotStream(
                f"{name} cannot be served: initial_carry{jax.tree_util.keystr(path)} has shape "
                f"{list(jnp.shape(leaf))}; the carry of one session has leaves [1, ...]. Give "
                "that, or a function of the batch size that returns the carry"
            )
    arrays = jax.tree.map(jnp.asarray, one)
    return lambda batch: jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (batch, *leaf.shape[1:])), arrays
    )
