"""Flax nnx modules that keep their state in Variables, or have an `nnx.RNN` inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx

from slotstream_worker.engine.building import build
from slotstream_worker.engine.errors import CannotStream
from slotstream_worker.engine.model import SampleShape, StreamModel
from slotstream_worker.engine.models.starts import abstract, batch_of, repeated
from slotstream_worker.engine.picks import Pick
from slotstream_worker.engine.state import Tree

Path = tuple[Any, ...]


def nnx(
    module: flax_nnx.Module,
    *,
    frame: int,
    sample_shape: SampleShape,
    dtype: Any = "float32",
    outputs: Pick = "all",
    rest: Callable[[Any, int], None] | None = None,
    batch_major: bool = False,
) -> StreamModel:
    """Serve an nnx module that is called with frames and remembers.

    Its state is what a call changes: the Variables it writes to, found by running it, and the
    carry of every `nnx.RNN` inside it. Everything else is weights. The module is put in `eval`
    mode.

    Args:
        module: called with `[frame, batch, *sample_shape]`; as it is now, it is at rest.
        frame: time steps a frame.
        sample_shape: shape of one time step of one session; of a model with several inputs, by
            their names.
        dtype: dtype of the frames, one for all inputs or by their names.
        outputs: what a reply carries, see `engine.picks`.
        rest: `rest(module, batch)` puts the module at rest for a batch of that size. By default
            it is made for a batch of 1, and its state Variables `[1, ...]` are repeated.
        batch_major: the module takes and returns `[batch, frame, ...]`.

    Raises:
        CannotStream: the module cannot be served, with the reason.
    """
    name = type(module).__name__
    module.eval()  # type: ignore[no-untyped-call]
    moved = _written(name, module, abstract(frame, 1, sample_shape, dtype), batch_major)
    # Random streams that a call leaves alone (dropout's, in eval mode) are no weights: a key has no
    # bytes to name a version by.
    graph, *parts = flax_nnx.split(module, lambda path, _: path in moved, flax_nnx.RngState, ...)
    held, random, weights = parts
    one = flax_nnx.to_pure_dict(held)
    start = None if rest else repeated(name, one, what="the Variable ")

    def apply(variables: Tree, state: Tree | None, frames: jax.Array) -> tuple[Any, Tree]:
        carries = {}
        if state is not None:
            values, carries = state["variables"], state["carries"]
        else:
            values = start(batch_of(frames)) if start else one
        # Variables of this call's own: nnx changes them in place, JAX traces this again, and a
        # transform of nnx refuses those that were made outside of a scan that it runs in.
        own = jax.tree.map(lambda leaf: leaf, (random, variables))
        merged = flax_nnx.merge(graph, _as_state(held, values), *own)
        if state is None and rest:
            rest(merged, batch_of(frames))
        going = _carry_on(merged, carries)
        ys = _call(merged, frames, batch_major)
        kept = flax_nnx.state(merged, lambda path, _: path in moved)
        after = {
            "variables": flax_nnx.to_pure_dict(kept),
            "carries": {path: one.carry for path, one in going.items()},
        }
        return ys, after

    return build(
        name, apply, weights, frame=frame, sample_shape=sample_shape, dtype=dtype, outputs=outputs
    )


class _Carrying:
    """Stands where an `nnx.RNN` stood, and goes on from the carry that was left."""

    def __init__(self, rnn: flax_nnx.RNN, carry: Tree | None) -> None:
        self.rnn, self.carry = rnn, carry

    def __call__(self, inputs: jax.Array, **options: Any) -> Any:
        wanted = options.pop("return_carry", None)
        major = options.get("time_major")
        major = self.rnn.time_major if major is None else major
        cell = self.rnn.cell
        if self.carry is None:
            axis = 0 if major else inputs.ndim - (cell.num_feature_axes + 1)
            shape = inputs.shape[:axis] + inputs.shape[axis + 1 :]
            self.carry = cell.initialize_carry(shape, flax_nnx.Rngs(0))
        self.carry, outputs = self.rnn(
            inputs, **{**options, "initial_carry": self.carry, "return_carry": True}
        )
        return (self.carry, outputs) if wanted or self.rnn.return_carry else outputs


def _carry_on(merged: Any, carries: dict[str, Tree]) -> dict[str, _Carrying]:
    """Let every `nnx.RNN` of a module go on from its carry, by the RNN's path."""
    found: dict[Path, flax_nnx.RNN] = {
        path: node for path, node in flax_nnx.iter_graph(merged) if isinstance(node, flax_nnx.RNN)
    }
    going: dict[str, _Carrying] = {}
    for path, rnn in found.items():
        if rnn.reverse:
            raise CannotStream(
                f"{'.'.join(map(str, path))} runs backwards from a stream's end, which has not "
                "come yet"
            )
        key = "/".join(map(str, path))
        parent: Any = merged
        for step in path[:-1]:
            parent = parent[step] if isinstance(parent, list | dict) else getattr(parent, str(step))
        going[key] = _Carrying(rnn, carries.get(key))
        if isinstance(parent, list | dict):
            parent[path[-1]] = going[key]
        else:
            object.__setattr__(parent, str(path[-1]), going[key])
    return going


def _call(merged: Any, frames: Any, batch_major: bool) -> Any:
    if not batch_major:
        return merged(frames)
    ys = merged(jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), frames))
    return jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1), ys)


def _written(name: str, module: Any, frames: Any, batch_major: bool) -> set[Path]:
    """Paths of the Variables that a call writes to."""
    graph, state = flax_nnx.split(module)
    changed: set[Path] = set()

    def run(values: Any, frames: Any) -> None:
        merged = flax_nnx.merge(graph, values)
        before = {path: variable.get_value() for path, variable in _variables(merged)}
        _carry_on(merged, {})
        _call(merged, frames, batch_major)
        changed.update(
            path
            for path, variable in _variables(merged)
            if variable.get_value() is not before[path]
        )

    try:
        jax.eval_shape(run, state, frames)
    except CannotStream as error:
        raise CannotStream(f"{name} cannot be served: {error}") from None
    except Exception as error:
        raise CannotStream(
            f"{name} cannot be served: one frame ([frame, batch, *sample_shape], {frames}) raised "
            f"{type(error).__name__}: {error}"
        ) from error
    return changed


def _variables(module: Any) -> list[tuple[Path, Any]]:
    return [
        (path, node)
        for path, node in flax_nnx.iter_graph(module)
        if isinstance(node, flax_nnx.Variable)
    ]


def _as_state(like: Any, values: Tree) -> Any:
    state = jax.tree.map(lambda leaf: leaf, like)
    flax_nnx.replace_by_pure_dict(state, values)
    return state
