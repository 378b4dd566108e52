"""A model as the engine runs it: one function of (variables, state, frames), and what it takes.

`models.linen` and `models.carry` build one; `build` finds each state leaf's batch axis and
refuses a model that cannot stream, with the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slotstream_worker.engine.errors import CannotStream
from slotstream_worker.engine.state import Leaf, StateSpec, Tree

Apply = Callable[[Tree, Tree | None, jax.Array], tuple[Any, Tree]]
"""`(variables, state or None for rest, frames [steps, batch, *sample]) -> (outputs, state)`."""


@dataclass(frozen=True)
class Output:
    """One named output of a session's frame: `shape` is `[frame, ...]`, without the batch axis."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class StreamModel:
    """A streaming model with its variables.

    `outputs` are what one frame of one session gives; `single` says that the model returns one
    array and not a mapping of names.
    """

    name: str
    apply: Apply
    variables: Tree
    frame: int
    sample_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    outputs: tuple[Output, ...]
    single: bool
    spec: StateSpec

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Shape of one frame of one session, time-major: `[frame, *sample_shape]`."""
        return (self.frame, *self.sample_shape)

    @cached_property
    def weights(self) -> str:
        """Name of the variables: 12 hex digits of a digest of their paths, dtypes and bytes."""
        digest = hashlib.sha256()
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.variables):
            array = np.asarray(leaf)
            digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:12]


def named(outputs: Any) -> dict[str, Any]:
    """The model's outputs as a mapping; one array is called `output`."""
    if isinstance(outputs, Mapping):
        return {str(name): value for name, value in outputs.items()}
    return {"output": outputs}


def random_frames(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """Frames that exercise a model: normal values, small integers, fair coins, by `dtype`."""
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    if np.issubdtype(dtype, np.integer):
        return rng.integers(0, 8, shape).astype(dtype)
    if np.issubdtype(dtype, np.complexfloating):
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


def build(
    name: str,
    apply: Apply,
    variables: Tree,
    *,
    frame: int,
    sample_shape: tuple[int, ...],
    dtype: Any,
) -> StreamModel:
    """Check that a model streams and say what it takes and gives.

    The model is run on abstract inputs at two batch sizes, which finds the batch axis of every
    state leaf, and once for real on a few random frames, which finds what no shape shows: a
    model that looks ahead, or whose past is not all in its state.

    Raises:
        CannotStream: with the reason.
    """
    dtype = np.dtype(dtype)
    sample_shape = tuple(int(n) for n in sample_shape)
    if frame < 1:
        raise CannotStream(f"a frame is at least one time step, got frame={frame}")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise CannotStream(
            f"{name} takes frames of {dtype}, which JAX computes in "
            f"{jax.dtypes.canonicalize_dtype(dtype)} unless jax_enable_x64 is set; "
            "set it, or choose another dtype"
        )
    variables = jax.tree.map(jnp.asarray, variables)
    (outputs, state), (_, wider) = (
        _abstract(name, apply, variables, None, (frame, batch, *sample_shape), dtype)
        for batch in (2, 3)
    )
    described = _outputs(name, outputs, frame)
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
        described,
        not isinstance(outputs, Mapping),
        spec,
    )
    from slotstream_worker.engine.streams import check_streams

    check_streams(model)
    return model


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
    except Exception as error:
        raise CannotStream(
            f"{name} cannot be served: one frame {list(shape)} "
            f"([frame, batch, *sample_shape]) {what} raised "
            f"{type(error).__name__}: {error}"
        ) from error


def _outputs(name: str, outputs: Any, frame: int) -> tuple[Output, ...]:
    described = []
    if not named(outputs):
        raise CannotStream(f"{name} cannot be served: it returns no outputs")
    for key, leaf in named(outputs).items():
        if not hasattr(leaf, "shape"):
            raise CannotStream(
                f"{name} cannot be served: outputs are one array or a mapping of "
                f"names to arrays, and {key!r} is a {type(leaf).__name__}"
            )
        if leaf.shape[:2] != (frame, 2):
            raise CannotStream(
                f"{name} cannot be served: a served model returns time-major outputs [frame, "
                f"batch, ...], here [{frame}, 2, ...], and {key!r} is {list(leaf.shape)}"
            )
        described.append(Output(key, (frame, *leaf.shape[2:]), np.dtype(leaf.dtype)))
    return tuple(described)


def _spec(name: str, state: Tree, wider: Tree) -> StateSpec:
    """Each leaf's batch axis: the one that grows with the batch."""
    grown = jax.tree.leaves(wider)
    leaves = []
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    for (path, small), large in zip(flat, grown, strict=True):
        text = jax.tree_util.keystr(path)
        axes = [
            axis for axis, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b
        ]
        if len(axes) != 1:
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
