"""Plain functions that are handed their state and hand it on: RNN cells, scans, filters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from slotstream_worker.engine.building import build
from slotstream_worker.engine.model import SampleShape, StreamModel
from slotstream_worker.engine.models.starts import batch_of, repeated
from slotstream_worker.engine.picks import Pick
from slotstream_worker.engine.seeds import Seeding
from slotstream_worker.engine.state import Tree

Step = Callable[[Tree, Tree, jax.Array], tuple[Tree, Any]]


def carry(
    step: Step,
    initial_carry: Callable[[int], Tree] | Tree,
    variables: Tree,
    *,
    frame: int,
    sample_shape: SampleShape,
    dtype: Any = "float32",
    outputs: Pick = "all",
    key: str = "",
    seed: int = 0,
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
        sample_shape: shape of one time step of one session; of a model with several inputs, by
            their names.
        dtype: dtype of the frames, one for all inputs or by their names.
        outputs: what a reply carries, see `engine.picks`.
        key: the leaf of the state that is a random key (uint32 `[2]`, `jax.random.key_data`), by
            its names with dots between; each session starts from a key of its own.
        seed: what the sessions' keys are drawn from, with their ids.
        name: what messages call the model; the function's name by default.

    Raises:
        CannotStream: the function cannot be served, with the reason.
    """
    called = name or str(getattr(step, "__name__", type(step).__name__))
    start = initial_carry if callable(initial_carry) else repeated(called, initial_carry)

    def apply(weights: Tree, state: Tree | None, frames: jax.Array) -> tuple[Any, Tree]:
        before = start(batch_of(frames)) if state is None else state
        after, ys = step(weights, before, frames)
        return ys, after

    return build(
        called,
        apply,
        variables,
        frame=frame,
        sample_shape=sample_shape,
        dtype=dtype,
        outputs=outputs,
        seeding=Seeding(seed, key, start) if key else None,
    )
