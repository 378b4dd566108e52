"""What a rank owns of a tree of variables: pieces of tensors, and their bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slotstream.codec import name_of
from slotstream.errors import BadFrame
from slotstream_worker.weights.boxes import Box
from slotstream_worker.weights.errors import BadWeights
from slotstream_worker.weights.manifest import Shard, Tensor
from slotstream_worker.weights.names import flatten


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that a rank owns.

    `array`: its values, of any strides. `shape`: the whole tensor's. `offset`: where the part
    begins in it.
    """

    array: Any
    shape: tuple[int, ...]
    offset: tuple[int, ...]


def leaves_of(variables: Any) -> dict[str, Any]:
    """Leaves by name; JAX knows more kinds of nodes, and is asked where it is there already."""
    jax = sys.modules.get("jax")
    if jax is None:
        return flatten(variables)
    pairs = jax.tree_util.tree_leaves_with_path(
        variables, is_leaf=lambda node: isinstance(node, Piece) or _of_pieces(node)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="/") or "weights": leaf
        for path, leaf in pairs
    }


def _of_pieces(node: Any) -> bool:
    return isinstance(node, list | tuple) and bool(node) and isinstance(node[0], Piece)


def pieces_of(name: str, leaf: Any) -> Iterable[Piece]:
    """What this process owns of a leaf."""
    if isinstance(leaf, Piece):
        return [leaf]
    if _of_pieces(leaf):
        return list(leaf)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        shape = tuple(leaf.shape)
        owned = [s for s in leaf.addressable_shards if s.replica_id == 0]
        return [
            Piece(s.data, shape, tuple(index.indices(n)[0] for index, n in zip(s.index, shape,
                                                                               strict=True)))
            for s in owned
        ]  # fmt: skip
    array = np.asarray(leaf)
    if array.dtype == object:
        raise BadWeights(f"{name} is a {type(leaf).__name__}, and weights are arrays")
    return [Piece(leaf, tuple(array.shape), (0,) * array.ndim)]


def tensor_of(name: str, pieces: list[Piece]) -> Tensor:
    """The tensor that pieces are of, with their boxes; digests and places are not known yet."""
    first = np.asarray(pieces[0].array)
    try:
        dtype = name_of(first.dtype)
    except BadFrame as error:
        raise BadWeights(f"{name}: {error}") from None
    shape = tuple(int(n) for n in pieces[0].shape)
    shards = []
    for piece in pieces:
        array = np.asarray(piece.array)
        box = Box(tuple(int(n) for n in piece.offset), tuple(array.shape))
        if array.dtype != first.dtype or tuple(piece.shape) != shape or not box.within(shape):
            raise BadWeights(
                f"{name}: a piece {array.dtype}{list(array.shape)} at {list(piece.offset)} is no "
                f"part of {dtype}{list(shape)}; give the whole tensor's shape, and where the piece "
                "begins in it"
            )
        shards.append(Shard(box, "", ()))
    return Tensor(name, dtype, shape, tuple(shards))


def bytes_of(array: Any) -> memoryview:
    """An array's bytes, little-endian in C order; copied only where they are not so already."""
    held = np.asarray(array)
    if held.dtype.byteorder == ">":
        held = held.astype(held.dtype.newbyteorder("<"))
    flat = np.ascontiguousarray(held).reshape(-1)
    return flat.view(np.uint8).data if flat.size else memoryview(b"")
