"""A model as the engine runs it: one function of (variables, state, frames), and what it takes.

`models.linen` and `models.carry` make one, through `building.build`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from slotstream_worker.engine.inputs import Input, pack
from slotstream_worker.engine.picks import Picked
from slotstream_worker.engine.state import StateSpec, Tree

Apply = Callable[[Tree, Tree | None, Any], tuple[Any, Tree]]
"""`(variables, state or None for rest, frames [steps, batch, *sample]) -> (outputs, state)`; with
several inputs, frames are a mapping of their names."""


SampleShape = tuple[int, ...] | Mapping[str, tuple[int, ...]]
"""Shape of one time step of one session, or that of each named input."""


@dataclass(frozen=True)
class Output:
    """One named output of a session's frame: `shape` is `[frame, ...]`, or of what was picked."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    timed: bool = True
    """Whether its first axis is the frame's steps."""


@dataclass(frozen=True)
class StreamModel:
    """A streaming model with its variables.

    `outputs` are what one frame of one session gives; `single` says that this is one array and not
    a mapping of names. `pick` makes it of the model's own outputs; None where they are sent whole.
    `inputs` are those of a model with several; its frames are then bytes (see `engine.inputs`).
    `rest` gives the row that a session starts from, where each has its own (see `engine.seeds`).
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
    pick: Picked | None = None
    inputs: tuple[Input, ...] = ()
    rest: Callable[[Hashable], bytes] | None = None

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Shape of one frame of one session, time-major: `[frame, *sample_shape]`."""
        return (self.frame, *self.sample_shape)

    def random_frames(
        self, rng: np.random.Generator, leading: tuple[int, ...]
    ) -> np.ndarray[Any, Any]:
        """Random frames `[*leading, frame, *sample_shape]` that exercise the model."""
        if not self.inputs:
            return random_frames(rng, (*leading, *self.frame_shape), self.dtype)
        each = {
            one.name: random_frames(rng, (*leading, self.frame, *one.shape), one.dtype)
            for one in self.inputs
        }
        return pack(self.inputs, each)

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
