"""How the engine holds its variables: shape and dtype of each leaf, and what lies on which device.

layout = Layout.of(model.variables)
buffers = layout.allocate()                 # on the host, in the engine's own layout
variables = layout.place(buffers)           # the same tree, on the same devices
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slotstream_worker.weights.boxes import Box

Array = np.ndarray[Any, Any]
Buffers = dict[tuple[str, Box], Array]
"""Host memory for what the devices hold, by the leaf's name and the box."""

_ALIGN = 64
"""Memory so aligned can become a device's own on a CPU, without another copy."""


@dataclass(frozen=True)
class Leaf:
    """One leaf of the variables, and the boxes of it that this process's devices hold."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Layout:
    """The leaves in tree order, and one set of variables laid out so."""

    leaves: tuple[Leaf, ...]
    like: Any

    @classmethod
    def of(cls, variables: Any) -> Layout:
        """Layout of a tree of JAX arrays."""
        leaves = []
        for path, array in jax.tree_util.tree_leaves_with_path(variables):
            name = jax.tree_util.keystr(path, simple=True, separator="/") or "weights"
            boxes = {
                _box(index, array.shape)
                for index in array.sharding.addressable_devices_indices_map(array.shape).values()
            }
            ordered = sorted(boxes, key=lambda box: (box.offset, box.extent))
            leaves.append(Leaf(name, tuple(array.shape), np.dtype(array.dtype), tuple(ordered)))
        return cls(tuple(leaves), variables)

    @cached_property
    def fingerprint(self) -> str:
        """Of everything a plan depends on."""
        lines = [
            f"{leaf.name} {leaf.dtype.name} {leaf.shape} {' '.join(map(str, leaf.boxes))}"
            for leaf in self.leaves
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of host memory that `allocate` takes."""
        return sum(box.volume * leaf.dtype.itemsize for leaf in self.leaves for box in leaf.boxes)

    def allocate(self) -> Buffers:
        """Host memory for all of it; what is in there is not defined."""
        return {
            (leaf.name, box): _aligned(box.extent, leaf.dtype)
            for leaf in self.leaves
            for box in leaf.boxes
        }

    def place(self, buffers: Mapping[tuple[str, Box], Array]) -> Any:
        """The variables of these values, on the same devices; waits until they are there."""
        arrays, treedef = jax.tree.flatten(self.like)
        placed = [
            _place(leaf, like, buffers) for leaf, like in zip(self.leaves, arrays, strict=True)
        ]
        return jax.block_until_ready(jax.tree.unflatten(treedef, placed))


def _place(leaf: Leaf, like: jax.Array, buffers: Mapping[tuple[str, Box], Array]) -> jax.Array:
    if len(like.sharding.device_set) > 1:
        parts = [
            jax.device_put(buffers[leaf.name, _box(index, leaf.shape)], device)
            for device, index in like.sharding.addressable_devices_indices_map(leaf.shape).items()
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, like.sharding, parts)
    buffer = buffers[leaf.name, Box.whole(leaf.shape)]
    if like.weak_type:
        return jnp.asarray(buffer.item())
    # Bound to a device or not, as the leaf before it: anything else would be compiled anew.
    placed: jax.Array = jax.device_put(buffer, like.sharding if like.committed else None)
    return placed


def _box(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    if index is None:
        return Box.whole(shape)
    ranges = [part.indices(n) for part, n in zip(index, shape, strict=True)]
    return Box(tuple(r[0] for r in ranges), tuple(r[1] - r[0] for r in ranges))


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    part: Array = raw[start : start + size]
    shaped: Array = part.view(dtype).reshape(shape)
    return shaped


def state_difference(
    model: Any, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
) -> str:
    """How the state of sessions would change with variables of these shapes; empty for not at all.

    Args:
        model: a `StreamModel`.
        shapes: shape and dtype of each leaf of the variables, by name.
    """
    leaves, treedef = jax.tree.flatten(model.variables)
    named = [leaf.name for leaf in Layout.of(model.variables).leaves]
    abstract = jax.tree.unflatten(
        treedef,
        [
            jax.ShapeDtypeStruct(*shapes.get(name, (leaf.shape, leaf.dtype)))
            for name, leaf in zip(named, leaves, strict=True)
        ],
    )
    frames = jax.ShapeDtypeStruct((model.frame, 1, *model.sample_shape), model.dtype)
    try:
        _, now = jax.eval_shape(model.apply, model.variables, None, frames)
        _, then = jax.eval_shape(model.apply, abstract, None, frames)
    except Exception as error:  # whatever a model makes of shapes it was not made for
        return f"the model does not run with them ({type(error).__name__})"
    before, after = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(s)}
        for s in (now, then)
    )
    differing = [
        f"state{path} {_text(before.get(path))} would become {_text(after.get(path))}"
        for path in sorted({*before, *after})
        if _text(before.get(path)) != _text(after.get(path))
    ]
    return "; ".join(differing[:8])


def _text(leaf: Any) -> str:
    return "nothing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
