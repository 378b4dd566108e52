"""RNN cells of `flax.linen` and `flax.nnx`, and their `RNN`: the carry is the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from slotstream_worker.engine.building import build
from slotstream_worker.engine.errors import CannotStream
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.engine.models.starts import repeated
from slotstream_worker.engine.picks import Pick
from slotstream_worker.engine.state import Tree

LinenCell = nn.RNNCellBase | nn.RNN
NnxCell = nnx.RNNCellBase | nnx.RNN


def rnn(
    cell: LinenCell | NnxCell,
    variables: Mapping[str, Any] | None = None,
    *,
    frame: int,
    sample_shape: tuple[int, ...],
    dtype: Any = "float32",
    outputs: Pick = "all",
) -> StreamModel:
    """Serve a recurrent cell (LSTM, GRU, MGU, ConvLSTM, one's own), or an `RNN` around one.

    A session starts from the cell's own `initialize_carry`. Outputs are what the cell returns at
    each step.

    Args:
        cell: a linen cell or RNN, or an nnx one, which holds its own variables.
        variables: a linen cell's variables, as `init` gave them or a checkpoint holds them.
        frame: time steps a frame.
        sample_shape: shape of one time step of one session.
        dtype: dtype of the frames.
        outputs: what a reply carries, see `engine.picks`.

    Raises:
        CannotStream: it cannot be served, with the reason.
    """
    name = type(cell).__name__
    if getattr(cell, "reverse", False):
        raise CannotStream(
            f"{name} cannot be served: reverse=True runs backwards from a stream's end, which has "
            "not come yet"
        )
    if isinstance(cell, (nnx.RNNCellBase, nnx.RNN)):
        if variables is not None:
            raise TypeError(f"an nnx {name} holds its variables itself; give none")
        apply, weights = _nnx(cell, sample_shape)
    else:
        if variables is None:
            raise TypeError(f"a linen {name} is served with variables, as its init gives them")
        apply, weights = _linen(cell, variables, sample_shape)
    return build(
        name, apply, weights, frame=frame, sample_shape=sample_shape, dtype=dtype, outputs=outputs
    )


def _linen(
    cell: LinenCell, variables: Mapping[str, Any], sample_shape: tuple[int, ...]
) -> tuple[Any, Tree]:
    inner = cell.cell if isinstance(cell, nn.RNN) else cell
    start = repeated(
        type(inner).__name__,
        inner.initialize_carry(jax.random.key(0), (1, *sample_shape)),
    )

    def apply(weights: Tree, state: Tree | None, frames: jax.Array) -> tuple[Any, Tree]:
        carry = start(frames.shape[1]) if state is None else state
        if isinstance(cell, nn.RNN):
            carry, ys = cell.apply(
                weights, frames, initial_carry=carry, return_carry=True, time_major=True
            )
        else:
            carry, ys = jax.lax.scan(lambda c, x: cell.apply(weights, c, x), carry, frames)
        return ys, carry

    return apply, dict(variables)


def _nnx(cell: NnxCell, sample_shape: tuple[int, ...]) -> tuple[Any, Tree]:
    inner = cell.cell if isinstance(cell, nnx.RNN) else cell
    start = repeated(type(inner).__name__, inner.initialize_carry((1, *sample_shape), nnx.Rngs(0)))
    graph, *parts = nnx.split(inner, nnx.Param, ...)
    weights, rest = parts

    def apply(weights: Tree, state: Tree | None, frames: jax.Array) -> tuple[Any, Tree]:
        carry = start(frames.shape[1]) if state is None else state

        def step(carry: Tree, x: jax.Array) -> tuple[Tree, Any]:
            after: tuple[Tree, Any] = nnx.merge(graph, weights, rest)(carry, x)
            return after

        carry, ys = jax.lax.scan(step, carry, frames)
        return ys, carry

    return apply, weights
