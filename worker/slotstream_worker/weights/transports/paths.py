"""Files on a path that publisher and workers share: ranges of them, as safetensors has them."""

from __future__ import annotations

import os
from pathlib import Path

from slotstream_worker.weights.errors import ShardGone
from slotstream_worker.weights.manifest import Shard, Tensor
from slotstream_worker.weights.transports.base import Tick

PIECE_BYTES = 8 * 2**20


class Paths:
    """Reads ranges of files; a file stays open for the shards that follow."""

    kind, artifact = "file", "file range"

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def has(self, tensor: Tensor, shard: Shard) -> bool:  # noqa: ARG002 (of any tensor)
        """See `Transport.has`."""
        return any(source.kind == self.kind for source in shard.sources)

    def read(self, tensor: Tensor, shard: Shard, into: memoryview, tick: Tick) -> None:
        """See `Transport.read`."""
        reasons = []
        for source in shard.sources:
            if source.kind == self.kind:
                path, offset = str(source.where["path"]), int(source.where["offset"])
                try:
                    self._read(path, offset, into, tick)
                    return
                except OSError as error:
                    reasons.append(f"{path}: {error.strerror or error}")
        raise ShardGone(f"{tensor.name}{shard.box}: {'; '.join(reasons)}")

    def _read(self, path: str, offset: int, into: memoryview, tick: Tick) -> None:
        number = self._open.get(path)
        if number is None:
            number = self._open[path] = os.open(Path(path), os.O_RDONLY)
        at = 0
        while at < len(into):
            count = os.preadv(number, [into[at : at + PIECE_BYTES]], offset + at)
            if not count:
                raise OSError(f"it ends {len(into) - at:,} bytes too early")
            at += count
            tick()

    def close(self) -> None:
        """See `Transport.close`."""
        for number in self._open.values():
            os.close(number)
        self._open.clear()
