"""Where a publishing rank's bytes go: chunks in Redis, a file on a shared path, or nowhere new."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

from slotstream.client import Client
from slotstream_worker.weights.boxes import Box
from slotstream_worker.weights.formats import DTYPES
from slotstream_worker.weights.manifest import Shard, Source, Tensor
from slotstream_worker.weights.names import chunk_key
from slotstream_worker.weights.transports.chunks import CHUNK_BYTES, chunk_count

CHUNKS_A_WRITE = 4
"""Chunks sent in one go: a few MiB."""


class Writer:
    """Where a rank's bytes go."""

    def plan(self, tensors: Iterable[Tensor]) -> list[tuple[str, int]]:
        """Chunks that will be written (prefix, how many), so that they can be deleted."""
        raise NotImplementedError

    def write(self, tensor: Tensor, shard: Shard, data: memoryview) -> Source:
        """Write a shard; returns where it is."""
        raise NotImplementedError

    def finish(self) -> None:
        """Make sure that everything is there."""


class ChunkWriter(Writer):
    """Chunks in Redis."""

    def __init__(self, client: Client, nonce: str) -> None:
        self._client, self._nonce = client, nonce
        self._prefixes: dict[tuple[str, Box], str] = {}

    def plan(self, tensors: Iterable[Tensor]) -> list[tuple[str, int]]:
        """See `Writer`."""
        planned: list[tuple[str, int]] = []
        for tensor in tensors:
            for shard in tensor.shards:
                prefix = f"{self._nonce}:{len(planned)}"
                self._prefixes[tensor.name, shard.box] = prefix
                planned.append((prefix, chunk_count(tensor.nbytes(shard.box))))
        return planned

    def write(self, tensor: Tensor, shard: Shard, data: memoryview) -> Source:
        """See `Writer`."""
        prefix, app = self._prefixes[tensor.name, shard.box], self._client.app.name
        commands = []
        for k in range(chunk_count(len(data))):
            part = data[k * CHUNK_BYTES : (k + 1) * CHUNK_BYTES]
            commands.append(("SET", chunk_key(app, prefix, k), bytes(part)))
            if len(commands) == CHUNKS_A_WRITE:
                self._client.link.calls(commands)
                commands = []
        self._client.link.calls(commands)
        return Source("redis", {"prefix": prefix})


class FileWriter(Writer):
    """One safetensors file a rank, written under another name and renamed when it is whole."""

    def __init__(self, folder: Path, version: str, nonce: str) -> None:
        self._path = (folder / f"{version}" / f"{nonce}.safetensors").resolve()
        self._tensors: list[Tensor] = []
        self._at: dict[tuple[str, Box], int] = {}

    def plan(self, tensors: Iterable[Tensor]) -> list[tuple[str, int]]:
        """See `Writer`."""
        self._tensors, start, header = list(tensors), 0, {}
        for tensor in self._tensors:
            for shard in tensor.shards:
                size = tensor.nbytes(shard.box)
                name = tensor.name if len(shard.box.extent) == 0 else f"{tensor.name}{shard.box}"
                header[name] = (tensor, shard.box, start, start + size)
                self._at[tensor.name, shard.box] = start
                start += size
        self._head = _header(header)
        return []

    def write(self, tensor: Tensor, shard: Shard, data: memoryview) -> Source:
        """See `Writer`."""
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
        """See `Writer`."""
        part = self._path.with_suffix(".part")
        if part.exists():
            with part.open("r+b") as file:
                os.fsync(file.fileno())
            part.rename(self._path)


class InPlace(Writer):
    """Files that are there already."""

    def __init__(self, places: Mapping[str, tuple[Path, int]]) -> None:
        self._places = places

    def plan(self, tensors: Iterable[Tensor]) -> list[tuple[str, int]]:  # noqa: ARG002
        """See `Writer`."""
        return []

    def write(self, tensor: Tensor, shard: Shard, data: memoryview) -> Source:  # noqa: ARG002
        """See `Writer`."""
        path, offset = self._places[tensor.name]
        return Source("file", {"path": str(path), "offset": offset})


def _header(entries: Mapping[str, tuple[Tensor, Box, int, int]]) -> bytes:
    names = {v: k for k, v in DTYPES.items()}
    header = {
        name: {"dtype": names.get(tensor.dtype, tensor.dtype.upper()),
               "shape": list(box.extent), "data_offsets": [start, end]}
        for name, (tensor, box, start, end) in entries.items()
    }  # fmt: skip
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw
