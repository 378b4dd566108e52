"""Making a `StreamModel`: what it takes, gives and holds is found by running it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slotstream_worker.engine.errors import CannotStream
from slotstream_worker.engine.inputs import Input, inputs_of, unpack
from slotstream_worker.engine.model import Apply, Output, StreamModel, named
from slotstream_worker.engine.picks import Pick, Picked, picked
from slotstream_worker.engine.seeds import Seeding, rest_rows
from slotstream_worker.engine.state import Leaf, StateSpec, Tree
from slotstream_worker.engine.streams import check_streams


def build(
    name: str,
    apply: Apply,
    variables: Tree,
    *,
    frame: int,
    sample_shape: tuple[int, ...] | Mapping[str, tuple[int, ...]],
    dtype: Any,
    outputs: Pick = "all",
    seeding: Seeding | None = None,
) -> StreamModel:
    """Check that a model streams and say what it takes and gives.

    The model is run on abstract inputs at two batch sizes, which finds the batch axis of every
    state leaf, and once for real on a few random frames, which finds what no shape shows: a
    model that looks ahead, or whose past is not all in its state.

    Raises:
        CannotStream: with the reason.
    """
    inputs: tuple[Input, ...] = ()
    if isinstance(sample_shape, Mapping):
        inputs = inputs_of(sample_shape, dtype)
        for one in inputs:
            _computable(f"{name}, input {one.name},", one.dtype)
        apply = _taking_apart(apply, inputs)
        sample_shape, dtype = (sum(one.nbytes for one in inputs),), np.uint8
        if not sample_shape[0]:
            raise CannotStream(f"{name} cannot be served: it takes no inputs")
    dtype = np.dtype(dtype)
    sample_shape = tuple(int(n) for n in sample_shape)
    if frame < 1:
        raise CannotStream(f"a frame is at least one time step, got frame={frame}")
    _computable(name, dtype)
    variables = jax.tree.map(jnp.asarray, variables)
    (steps, state), (wider_steps, wider) = (
        _abstract(name, apply, variables, None, (frame, batch, *sample_shape), dtype)
        for batch in (2, 3)
    )
    _check_outputs(name, steps, wider_steps, frame)
    pick = picked(outputs)
    sent, longer = (_picked(name, pick, steps, frame + more) for more in (0, 1))
    spec = _spec(name, state, wider)
    _, again = _abstract(name, apply, variables, state, (frame, 2, *sample_shape), dtype)
    _same_state(name, state, again)
    model = StreamModel(
        name,
        apply,
        variables,
        frame,
        sample_shape,
        dtype,
        tuple(
            Output(
                key,
                leaf.shape,
                np.dtype(leaf.dtype),
                leaf.shape != named(longer)[key].shape,
            )
            for key, leaf in named(sent).items()
        ),
        not isinstance(sent, Mapping),
        spec,
        pick,
        inputs,
        rest_rows(name, spec, seeding) if seeding else None,
    )
    check_streams(model)
    return model


def _computable(name: str, dtype: np.dtype[Any]) -> None:
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise CannotStream(
            f"{name} takes frames of {dtype}, which JAX computes in "
            f"{jax.dtypes.canonicalize_dtype(dtype)} unless jax_enable_x64 is set; "
            "set it, or choose another dtype"
        )


def _taking_apart(apply: Apply, inputs: tuple[Input, ...]) -> Apply:
    """The same, from frames of bytes."""

    def packed(variables: Tree, state: Tree | None, frames: jax.Array) -> tuple[Any, Tree]:
        return apply(variables, state, unpack(inputs, frames))

    return packed


def _abstract(
    name: str,
    apply: Apply,
    variables: Tree,
    state: Tree | None,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> tuple[Any, Tree]:
    frames = jax.ShapeDtypeStruct(shape, dtype)
    what = "from rest" if state is None else "from the state of the frame before"
    try:
        return jax.eval_shape(apply, variables, state, frames)
    except CannotStream as error:  # an adapter knows better why
        raise CannotStream(f"{name} cannot be served: {error}") from None
    except Exception as error:
        raise CannotStream(
            f"{name} cannot be served: one frame {list(shape)} "
            f"([frame, batch, *sample_shape]) {what} raised "
            f"{type(error).__name__}: {error}"
        ) from error


def _check_outputs(name: str, outputs: Any, wider: Any, frame: int) -> None:
    if not named(outputs):
        raise CannotStream(f"{name} cannot be served: it returns no outputs")
    for key, leaf in named(outputs).items():
        if not hasattr(leaf, "shape"):
            raise CannotStream(
                f"{name} cannot be served: outputs are one array or a mapping of "
                f"names to arrays, and {key!r} is a {type(leaf).__name__}"
            )
        grown = named(wider)[key]
        if leaf.shape[:2] != (frame, 2) or grown.shape[:2] != (frame, 3):
            raise CannotStream(
                f"{name} cannot be served: a served model returns time-major outputs [frame, "
                f"batch, ...], here [{frame}, 2, ...], and {key!r} is {list(leaf.shape)}"
            )


def _picked(name: str, pick: Picked | None, steps: Any, frame: int) -> Any:
    """Shapes of what is sent of one session's frame of so many steps."""
    one = jax.tree.map(lambda y: jax.ShapeDtypeStruct((frame, *y.shape[2:]), y.dtype), steps)
    if pick is None:
        return one
    try:
        sent = jax.eval_shape(pick.act, one, jax.ShapeDtypeStruct((), np.int32))
    except Exception as error:
        raise CannotStream(
            f"{name} cannot be served: outputs= raised {type(error).__name__} on what one frame of "
            f"one session gives: {error}"
        ) from error
    for key, leaf in named(sent).items():
        if not hasattr(leaf, "shape"):
            raise CannotStream(
                f"{name} cannot be served: outputs= gives one array or a mapping of names to "
                f"arrays, and {key!r} is a {type(leaf).__name__}"
            )
    return sent


def _spec(name: str, state: Tree, wider: Tree) -> StateSpec:
    """Each leaf's batch axis: the one that grows with the batch."""
    grown = jax.tree.leaves(wider)
    leaves = []
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    for (path, small), large in zip(flat, grown, strict=True):
        text = jax.tree_util.keystr(path)
        if jnp.issubdtype(small.dtype, jax.dtypes.extended):
            raise CannotStream(
                f"{name} cannot be served: its state leaf {text} is of {small.dtype}, which has no "
                "bytes of its own; keep jax.random.key_data of it"
            )
        axes = [
            axis for axis, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b
        ]
        if len(axes) != 1 or (small.shape[axes[0]], large.shape[axes[0]]) != (2, 3):
            raise CannotStream(
                f"{name} cannot be served: its state leaf {text} of shape {list(small.shape)} at "
                "batch 2 has no single batch axis, so sessions cannot hold rows of it; give it "
                "one axis of the batch's size"
            )
        (axis,) = axes
        shape = small.shape[:axis] + small.shape[axis + 1 :]
        leaves.append(Leaf(text, shape, np.dtype(small.dtype), axis))
    return StateSpec(tuple(leaves), treedef)


def _same_state(name: str, first: Tree, later: Tree) -> None:
    """A state that changes its structure from one frame to the next cannot be a row."""
    before: Any = jax.tree.structure(first)
    after: Any = jax.tree.structure(later)
    if before != after:
        raise CannotStream(
            f"{name} cannot be served: its state is {before} after the first frame "
            f"and {after} after the second"
        )
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(later), strict=True
    ):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise CannotStream(
                f"{name} cannot be served: its state leaf {jax.tree_util.keystr(path)} is "
                f"{a.dtype}{list(a.shape)} after the first frame and {b.dtype}{list(b.shape)} "
                "after the second; keep its dtype and shape"
            )
