"""Publishing a version: from a trainer's loop, from several ranks at once, from a file.

    from slotstream_worker.weights import publish
    publish(client, variables, version="step-1200")              # one process, all of it
    publish(client, pieces, version="step-1200", rank=2, ranks=4)   # each rank what it owns

A version becomes ready in one step, once every rank's bytes are there and hold every element of
every tensor exactly once; until then nobody sees it. Needs no device.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from slotstream.client import Client
from slotstream.codec import name_of
from slotstream.errors import BadFrame
from slotstream_worker.weights.boxes import Box
from slotstream_worker.weights.catalogue import Catalogue
from slotstream_worker.weights.digests import digest
from slotstream_worker.weights.errors import BadWeights, Incomplete
from slotstream_worker.weights.formats import read_weights
from slotstream_worker.weights.manifest import (
    Manifest,
    Options,
    Shard,
    Source,
    Tensor,
    assemble,
)
from slotstream_worker.weights.names import check_version, chunk_key, flatten
from slotstream_worker.weights.transports.chunks import CHUNK_BYTES, chunk_count

_POLL_S = 0.02
_CHUNKS_A_WRITE = 4


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that a rank owns.

    `array`: its values, of any strides. `shape`: the whole tensor's. `offset`: where the part
    begins in it.
    """

    array: Any
    shape: tuple[int, ...]
    offset: tuple[int, ...]


def publish(
    client: Client,
    variables: Any,
    *,
    version: str,
    rank: int = 0,
    ranks: int = 1,
    on_weights: str = "keep",
    at_once: bool = False,
    cast: bool = False,
    extra: bool = False,
    canary: bytes | None = None,
    folder: Path | None = None,
    keep: int = 4,
    wait_s: float = 60.0,
) -> Manifest | None:
    """Publish a version, or one rank's part of it.

    Args:
        client: whose app it is for.
        variables: any tree of arrays (NumPy, JAX or what NumPy can read), or of `Piece`; of a JAX
            array the shards of this process are published, each replica once.
        version: its name, new for each.
        rank: which of the ranks this is.
        ranks: how many publish it together; all say the same.
        on_weights: what becomes of the sessions' states: `keep`, `reset` to rest, or `pin` (a
            session finishes on the version it began with).
        at_once: no worker applies it before all have verified it.
        cast: a dtype may be changed with a loss where the model has another.
        extra: tensors that the model has no leaf for are passed over.
        canary: an .npz of recorded frames (see `canary`).
        folder: write files there, on a path that the workers see, instead of chunks in Redis.
        keep: older versions beyond so many are deleted, where nobody needs them; 0 for none.
        wait_s: how long to wait for the other ranks; 0 for not at all.

    Returns:
        The manifest, or None where other ranks are not done and are not waited for.

    Raises:
        BadWeights: the version exists already, or is not whole; it is not published then.
        Incomplete: the other ranks did not finish in time.
    """
    pieces = {name: list(_pieces(name, leaf)) for name, leaf in _leaves(variables).items()}
    options = Options(on_weights, at_once, cast, extra, canary is not None)
    work = _Publication(client, check_version(version), rank, ranks, options, canary)
    writer = _Chunks(client, work.nonce) if folder is None else _Files(folder, version, work.nonce)
    manifest = work.run(pieces, writer, wait_s)
    if manifest is not None and keep:
        work.catalogue.prune(keep)
    return manifest


def publish_file(client: Client, path: Path, *, version: str, in_place: bool = False,
                 **settings: Any) -> Manifest | None:  # fmt: skip
    """Publish what a file or folder holds (see `formats`); the rest as `publish`.

    `in_place`: the workers read the safetensors files themselves, from this very path.
    """
    found = read_weights(path)
    if not in_place:
        return publish(client, dict(found.arrays), version=version, **settings)
    if set(found.places) != set(found.arrays):
        raise BadWeights(
            f"{path} is {found.kind}, whose tensors do not lie in the file as they are; only "
            "safetensors can be read in place. Leave --in-place out, or give --folder"
        )
    keep, wait_s = settings.pop("keep", 4), settings.pop("wait_s", 60.0)
    canary, folder = settings.pop("canary", None), settings.pop("folder", None)
    if folder is not None:
        raise BadWeights("in place means that no files are written; leave one of the two out")
    rank, ranks = settings.pop("rank", 0), settings.pop("ranks", 1)
    options = Options(canary=canary is not None, **settings)
    work = _Publication(client, check_version(version), rank, ranks, options, canary)
    pieces = {
        name: [Piece(array, array.shape, (0,) * array.ndim)] for name, array in found.arrays.items()
    }
    manifest = work.run(pieces, _InPlace(found.places), wait_s)
    if manifest is not None and keep:
        work.catalogue.prune(keep)
    return manifest


class _Publication:
    """One rank's part in publishing one version."""

    def __init__(
        self, client: Client, version: str, rank: int, ranks: int, options: Options,
        canary: bytes | None,
    ) -> None:  # fmt: skip
        if not 0 <= rank < ranks:
            raise BadWeights(f"rank is 0 to {ranks - 1} of {ranks} ranks, got {rank}")
        self.catalogue = Catalogue(client.link, client.app.name)
        self.version, self.rank, self.ranks, self.options = version, rank, ranks, options
        self.nonce = f"{version}.{rank}.{secrets.token_hex(4)}"
        self._canary = canary

    def run(
        self, pieces: Mapping[str, list[Piece]], writer: _Writer, wait_s: float
    ) -> Manifest | None:
        """Write the bytes, then say that they are there, then see whether all is."""
        described = [_tensor(name, parts) for name, parts in pieces.items() if parts]
        planned = writer.plan(described)
        self.catalogue.begin(self.version, self.ranks, self.rank, self.options, self.nonce, planned)
        if self._canary is not None:
            self.catalogue.write_canary(self.version, self._canary)
        tensors = []
        for tensor in described:
            shards = []
            for piece, shard in zip(pieces[tensor.name], tensor.shards, strict=True):
                data = _bytes(piece.array)
                source = writer.write(tensor, shard, data)
                shards.append(Shard(shard.box, digest(data), (source,)))
            tensors.append(replace(tensor, shards=tuple(shards)))
        writer.finish()
        self.catalogue.register(self.version, self.rank, tensors)
        return self._complete(wait_s)

    def _complete(self, wait_s: float) -> Manifest | None:
        """Assemble the manifest once every rank is done. Whoever sees that does it."""
        deadline = time.monotonic() + wait_s
        while True:
            entry = self.catalogue.entry(self.version)
            if entry is None or entry.status not in ("publishing", "ready"):
                raise BadWeights(
                    f"version {self.version} has been given up: "
                    + (f"{entry.status}, {entry.reason}" if entry else "it was deleted")
                )
            if entry.status == "ready":
                return self.catalogue.manifest(self.version)
            parts = self.catalogue.parts(self.version)
            if len(parts) == self.ranks:
                try:
                    manifest = assemble(
                        self.version, [parts[r] for r in sorted(parts)], self.options
                    )
                except BadWeights as error:
                    self.catalogue.refuse(self.version, f"rank {self.rank}", str(error))
                    raise
                self.catalogue.ready(manifest)
                return manifest
            if time.monotonic() > deadline:
                if not wait_s:
                    return None
                missing = sorted(set(range(self.ranks)) - set(parts))
                raise Incomplete(
                    f"version {self.version} is not complete after {wait_s:g} s: of {self.ranks} "
                    f"ranks these have not published: {', '.join(map(str, missing[:16]))}. It "
                    "becomes ready when they have"
                )
            time.sleep(_POLL_S)


class _Writer:
    """Where a rank's bytes go."""

    def plan(self, tensors: Iterable[Tensor]) -> list[tuple[str, int]]:
        """Chunks that will be written (prefix, how many), so that they can be deleted."""
        raise NotImplementedError

    def write(self, tensor: Tensor, shard: Shard, data: memoryview) -> Source:
        """Write a shard; returns where it is."""
        raise NotImplementedError

    def finish(self) -> None:
        """Make sure that everything is there."""


class _Chunks(_Writer):
    """Chunks in Redis."""

    def __init__(self, client: Client, nonce: str) -> None:
        self._client, self._nonce = client, nonce
        self._prefixes: dict[tuple[str, Box], str] = {}

    def plan(self, tensors: Iterable[Tensor]) -> list[tuple[str, int]]:
        planned = []
        for tensor in tensors:
            for shard in tensor.shards:
                prefix = f"{self._nonce}:{len(planned)}"
                self._prefixes[tensor.name, shard.box] = prefix
                planned.append((prefix, chunk_count(tensor.nbytes(shard.box))))
        return planned

    def write(self, tensor: Tensor, shard: Shard, data: memoryview) -> Source:
        prefix, app = self._prefixes[tensor.name, shard.box], self._client.app.name
        commands = []
        for k in range(chunk_count(len(data))):
            part = data[k * CHUNK_BYTES : (k + 1) * CHUNK_BYTES]
            commands.append(("SET", chunk_key(app, prefix, k), bytes(part)))
            if len(commands) == _CHUNKS_A_WRITE:
                self._client.link.calls(commands)
                commands = []
        self._client.link.calls(commands)
        return Source("redis", {"prefix": prefix})


class _Files(_Writer):
    """One safetensors file a rank, written under another name and renamed when it is whole."""

    def __init__(self, folder: Path, version: str, nonce: str) -> None:
        self._path = (folder / f"{version}" / f"{nonce}.safetensors").resolve()
        self._tensors: list[Tensor] = []
        self._at: dict[tuple[str, Box], int] = {}

    def plan(self, tensors: Iterable[Tensor]) -> list[tuple[str, int]]:
        self._tensors, start, header = list(tensors), 0, {}
        for tensor in self._tensors:
            for shard in tensor.shards:
                size = tensor.nbytes(shard.box)
                name = tensor.name if len(shard.box.extent) == 0 else f"{tensor.name}{shard.box}"
                header[name] = (tensor, shard.box, start, start + size)
                self._at[tensor.name, shard.box] = start
                start += size
        self._head = _safetensors_header(header)
        return []

    def write(self, tensor: Tensor, shard: Shard, data: memoryview) -> Source:
        part = self._path.with_suffix(".part")
        if not part.exists():
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(self._head)
        offset = len(self._head) + self._at[tensor.name, shard.box]
        with part.open("r+b") as file:
            file.seek(offset)
            file.write(data)
        return Source("file", {"path": str(self._path), "offset": offset})

    def finish(self) -> None:
        part = self._path.with_suffix(".part")
        if part.exists():
            with part.open("r+b") as file:
                os.fsync(file.fileno())
            part.rename(self._path)


class _InPlace(_Writer):
    """Files that are there already."""

    def __init__(self, places: Mapping[str, tuple[Path, int]]) -> None:
        self._places = places

    def plan(self, tensors: Iterable[Tensor]) -> list[tuple[str, int]]:  # noqa: ARG002
        return []

    def write(self, tensor: Tensor, shard: Shard, data: memoryview) -> Source:  # noqa: ARG002
        path, offset = self._places[tensor.name]
        return Source("file", {"path": str(path), "offset": offset})


def _safetensors_header(entries: Mapping[str, tuple[Tensor, Box, int, int]]) -> bytes:
    import json
    import struct

    from slotstream_worker.weights.formats import _DTYPES

    names = {v: k for k, v in _DTYPES.items()}
    header = {
        name: {"dtype": names.get(tensor.dtype, tensor.dtype.upper()),
               "shape": list(box.extent), "data_offsets": [start, end]}
        for name, (tensor, box, start, end) in entries.items()
    }  # fmt: skip
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def _leaves(variables: Any) -> dict[str, Any]:
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


def _pieces(name: str, leaf: Any) -> Iterable[Piece]:
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


def _tensor(name: str, pieces: list[Piece]) -> Tensor:
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


def _bytes(array: Any) -> memoryview:
    """An array's bytes, little-endian in C order; copied only where they are not so already."""
    held = np.asarray(array)
    if held.dtype.byteorder == ">":
        held = held.astype(held.dtype.newbyteorder("<"))
    flat = np.ascontiguousarray(held).reshape(-1)
    return memoryview(flat.view(np.uint8) if flat.size else np.zeros(0, np.uint8))
