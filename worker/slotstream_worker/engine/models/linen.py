"""Flax linen modules that keep their state in a mutable collection."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import flax.core
import flax.linen as nn
import jax

from slotstream_worker.engine.building import build
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.engine.state import Tree


def linen(
    module: nn.Module,
    variables: Mapping[str, Any],
    *,
    frame: int,
    sample_shape: tuple[int, ...],
    dtype: Any = "float32",
    call: Mapping[str, Any] | None = None,
    collection: str = "state",
) -> StreamModel:
    """Serve a linen module whose state lives in the mutable collection `collection`.

    The module is called with time-major frames `[frame, batch, *sample_shape]` and starts at
    rest when the collection is empty. A collection of that name in `variables` is left out,
    since each session starts at rest. Every other collection (`params`, `batch_stats`) is read
    only. `train=False` is passed where the module takes `train`.

    Args:
        module: returns time-major outputs `[frame, batch, ...]`, one array or a mapping.
        variables: the module's variables.
        frame: time steps a frame.
        sample_shape: shape of one time step of one session.
        dtype: dtype of the frames.
        call: further keyword arguments of the call.
        collection: name of the collection that holds the state.

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
        held = {} if state is None else {collection: state}
        outputs, updated = module.apply({**weights, **held}, frames, mutable=[collection], **kwargs)
        return outputs, flax.core.unfreeze(updated).get(collection, {})

    return build(
        type(module).__name__, apply, read_only, frame=frame, sample_shape=sample_shape, dtype=dtype
    )
