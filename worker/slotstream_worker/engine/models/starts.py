"""Where a session starts from: the state of one session, for a batch of any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slotstream_worker.engine.errors import CannotStream
from slotstream_worker.engine.inputs import inputs_of
from slotstream_worker.engine.model import SampleShape
from slotstream_worker.engine.state import Tree


def batch_of(frames: Any) -> int:
    """Batch size of frames `[frame, batch, *sample_shape]`, one array or several by name."""
    return int(jax.tree.leaves(frames)[0].shape[1])


def abstract(frame: int, batch: int, sample_shape: SampleShape, dtype: Any) -> Any:
    """Frames of these shapes for `jax.eval_shape`."""
    if not isinstance(sample_shape, Mapping):
        return jax.ShapeDtypeStruct((frame, batch, *sample_shape), np.dtype(dtype))
    return {
        one.name: jax.ShapeDtypeStruct((frame, batch, *one.shape), one.dtype)
        for one in inputs_of(sample_shape, dtype)
    }


def repeated(name: str, one: Tree, *, what: str = "initial_carry") -> Callable[[int], Tree]:
    """A state of one session, leaves `[1, ...]`, repeated along its leading axis.

    Raises:
        CannotStream: a leaf has no leading axis of 1.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(one):
        if jnp.shape(leaf)[:1] != (1,):
            raise CannotStream(
                f"{name} cannot be served: {what}{jax.tree_util.keystr(path)} has shape "
                f"{list(jnp.shape(leaf))}; the state of one session has leaves [1, ...]. Give "
                "that, or a function of the batch size"
            )
    arrays = jax.tree.map(jnp.asarray, one)
    return lambda batch: jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (batch, *leaf.shape[1:])), arrays
    )
