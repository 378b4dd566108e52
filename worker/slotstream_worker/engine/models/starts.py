"""Where a session starts from: the state of one session, for a batch of any size."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from slotstream_worker.engine.errors import CannotStream
from slotstream_worker.engine.state import Tree


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
