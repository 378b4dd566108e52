"""Equinox modules: one example, one time step, `module(x, state)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slotstream_worker.engine.model import SampleShape, StreamModel
from slotstream_worker.engine.models.example import example
from slotstream_worker.engine.picks import Pick
from slotstream_worker.engine.state import Tree


def equinox(
    module: Any,
    initial_state: Tree,
    step: Callable[[Any, Tree, Any], tuple[Tree, Any]] | None = None,
    *,
    frame: int,
    sample_shape: SampleShape,
    dtype: Any = "float32",
    outputs: Pick = "all",
) -> StreamModel:
    """Serve an Equinox module of one example.

    Args:
        module: an `equinox.Module`; its arrays are the weights.
        initial_state: the state that a session starts from (for `GRUCell` the hidden vector, for
            `LSTMCell` the pair of hidden and cell vector).
        step: `step(module, state, x) -> (state, y)` for one time step. By default that of
            Equinox's own cells: `module(x, state)` is the new state, and the output is its first
            array.
        frame: time steps a frame.
        sample_shape: shape of one time step.
        dtype: dtype of the frames.
        outputs: what a reply carries, see `engine.picks`.

    Raises:
        CannotStream: the module cannot be served, with the reason.
        ImportError: Equinox is not installed.
    """
    import equinox as eqx

    arrays, static = eqx.partition(module, eqx.is_array)

    def one(weights: Tree, state: Tree, x: Any) -> tuple[Tree, Any]:
        whole = eqx.combine(weights, static)
        if step is not None:
            return step(whole, state, x)
        after = whole(x, state)
        return after, after[0] if isinstance(after, tuple) else after

    return example(
        one,
        initial_state,
        arrays,
        frame=frame,
        sample_shape=sample_shape,
        dtype=dtype,
        outputs=outputs,
        per_step=True,
        name=type(module).__name__,
    )
