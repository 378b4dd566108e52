"""Flax linen modules that keep their state in a mutable collection, or have an `nn.RNN` inside."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp

from slotstream_worker.engine.building import build
from slotstream_worker.engine.errors import CannotStream
from slotstream_worker.engine.model import SampleShape, StreamModel
from slotstream_worker.engine.picks import Pick
from slotstream_worker.engine.state import Tree


def linen(
    module: nn.Module,
    variables: Mapping[str, Any],
    *,
    frame: int,
    sample_shape: SampleShape,
    dtype: Any = "float32",
    call: Mapping[str, Any] | None = None,
    collection: str = "state",
    outputs: Pick = "all",
    batch_major: bool = False,
) -> StreamModel:
    """Serve a linen module whose state lives in the mutable collection `collection`.

    The module is called with time-major frames `[frame, batch, *sample_shape]` and starts at
    rest when the collection is empty. A collection of that name in `variables` is left out,
    since each session starts at rest. Every other collection (`params`, `batch_stats`) is read
    only. `train=False` is passed where the module takes `train`. The carry of every `nn.RNN` inside
    the module is state as well: it goes on from where the frame before left it.

    Args:
        module: returns time-major outputs `[frame, batch, ...]`, one array or a mapping.
        variables: the module's variables.
        frame: time steps a frame.
        sample_shape: shape of one time step of one session; of a model with several inputs, by
            their names.
        dtype: dtype of the frames, one for all inputs or by their names.
        call: further keyword arguments of the call.
        collection: name of the collection that holds the state.
        outputs: what a reply carries, see `engine.picks`.
        batch_major: the module takes and returns `[batch, frame, ...]`.

    Raises:
        CannotStream: the module cannot be served, with the reason.
    """
    kwargs = dict(call or {})
    if "train" in inspect.signature(type(module).__call__).parameters:
        kwargs.setdefault("train", False)
    read_only = {
        name: tree
        for name, tree in flax.core.unfreeze(dict(variables)).items()
        if name != collection
    }

    def apply(weights: Tree, state: Tree | None, frames: jax.Array) -> tuple[Any, Tree]:
        before = state if isinstance(state, tuple) else (state or {}, {})
        held = {collection: before[0]} if before[0] else {}
        carries: dict[str, Tree] = {}
        with nn.intercept_methods(_going_on(before[1], carries)):
            ys, updated = module.apply(
                {**weights, **held}, _turned(frames, batch_major), mutable=[collection], **kwargs
            )
        after = flax.core.unfreeze(updated).get(collection, {})
        return _turned(ys, batch_major), (after, carries) if carries else after

    return build(
        type(module).__name__,
        apply,
        read_only,
        frame=frame,
        sample_shape=sample_shape,
        dtype=dtype,
        outputs=outputs,
    )


def _turned(arrays: Any, batch_major: bool) -> Any:
    """Time and batch axis changed about, where the module wants or gives them so."""
    if not batch_major:
        return arrays
    return jax.tree.map(lambda array: jnp.moveaxis(array, 0, 1), arrays)


def _going_on(before: Mapping[str, Tree], after: dict[str, Tree]) -> Callable[..., Any]:
    """Lets every `nn.RNN` of a call start from its carry in `before`, and notes where it ends."""

    def intercept(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        rnn = context.module
        if not isinstance(rnn, nn.RNN) or context.method_name != "__call__":
            return call(*args, **kwargs)
        path = "/".join(rnn.path)
        if kwargs.get("reverse", rnn.reverse):
            raise CannotStream(f"{path} runs backwards from a stream's end, which has not come yet")
        if path in after:
            raise CannotStream(f"{path} is called more than once a frame; give each call its own")
        wanted = kwargs.pop("return_carry", None)
        wanted = rnn.return_carry if wanted is None else wanted
        if path in before:
            kwargs["initial_carry"] = before[path]
        after[path], ys = call(*args, **{**kwargs, "return_carry": True})
        return (after[path], ys) if wanted else ys

    return intercept
