"""The shape of a session's state: one row of every leaf, and its bytes.

A model's state is any tree of arrays, each with its own batch axis. The pool holds it
slot-major (`[slots + 1, ...]`), so the batch axis is moved to the front on the way in and back
on the way out; both are part of the compiled launch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any
"""A JAX tree of arrays; its structure is the model's own."""


@dataclass(frozen=True)
class Leaf:
    """One leaf of a session's state, without its batch axis.

    `path` is its name in the tree, `axis` the batch axis in the model's own array.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axis: int

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StateSpec:
    """Leaves of a state in tree order, and the tree they make."""

    leaves: tuple[Leaf, ...]
    treedef: Any

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one session's state."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @cached_property
    def layout(self) -> str:
        """Fingerprint of the structure: a checkpoint of another layout is not this model's."""
        text = "\n".join(f"{leaf.path} {leaf.dtype.name} {leaf.shape}" for leaf in self.leaves)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def zeros(self, rows: int) -> list[jax.Array]:
        """Slot-major arrays `[rows, ...]` of zeros, one a leaf."""
        return [jnp.zeros((rows, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    def to_model(self, rows: Sequence[jax.Array]) -> Tree:
        """The model's own tree, each leaf's batch axis back in its place."""
        moved = [
            jnp.moveaxis(array, 0, leaf.axis) for array, leaf in zip(rows, self.leaves, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, moved)

    def from_model(self, tree: Tree) -> list[jax.Array]:
        """Slot-major arrays of the model's tree; inverse of `to_model`."""
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            raise ValueError(
                f"the model returned a state of structure {treedef}, "
                f"and one of {self.treedef} was expected"
            )
        return [
            jnp.moveaxis(array, leaf.axis, 0)
            for array, leaf in zip(leaves, self.leaves, strict=True)
        ]

    def pack(self, rows: Sequence[np.ndarray[Any, Any]], count: int) -> list[bytes]:
        """Rows as bytes: every leaf in tree order, little-endian in C order, without gaps.

        Args:
            rows: one array `[count, ...]` a leaf.
            count: number of rows; a model without state has rows of no bytes.
        """
        if not self.leaves:
            return [b""] * count
        flat = [
            np.ascontiguousarray(array).reshape(count, -1).view(np.uint8)
            if leaf.nbytes
            else np.zeros((count, 0), np.uint8)
            for array, leaf in zip(rows, self.leaves, strict=True)
        ]
        whole = np.concatenate(flat, axis=1) if len(flat) > 1 else flat[0]
        data, size = whole.tobytes(), whole.shape[1]
        return [data[k * size : (k + 1) * size] for k in range(count)]

    def unpack(self, packed: Sequence[bytes]) -> list[np.ndarray[Any, Any]]:
        """Arrays `[n, ...]`, one a leaf, from rows as `pack` made them; raises `ValueError`."""
        for raw in packed:
            if len(raw) != self.row_bytes:
                raise ValueError(
                    f"a row of this model's state takes {self.row_bytes} bytes, got {len(raw)}"
                )
        whole = np.frombuffer(b"".join(packed), np.uint8).reshape(len(packed), self.row_bytes)
        arrays, start = [], 0
        for leaf in self.leaves:
            part = np.ascontiguousarray(whole[:, start : start + leaf.nbytes])
            arrays.append(
                part.view(leaf.dtype).reshape(len(packed), *leaf.shape)
                if leaf.nbytes
                else np.zeros((len(packed), *leaf.shape), leaf.dtype)
            )
            start += leaf.nbytes
        return arrays
