"""Chunks in Redis: strings of a MiB, so that Redis is held by none for long.

Several are asked for at a time, so that one is on its way while another is taken in.
"""

from __future__ import annotations

from collections import deque

from slotstream.endpoint import Endpoint
from slotstream.lines import Line
from slotstream_worker.weights.errors import ShardGone
from slotstream_worker.weights.manifest import Shard, Source, Tensor
from slotstream_worker.weights.names import chunk_key
from slotstream_worker.weights.transports.base import Tick

CHUNK_BYTES = 2**20
AHEAD = 4
"""Chunks asked for and not taken in yet."""


def chunk_count(nbytes: int) -> int:
    """Chunks of a shard of so many bytes; an empty one has one too, which says that it is there."""
    return max(-(-nbytes // CHUNK_BYTES), 1)


class Chunks:
    """Reads chunks of one app. Its connections are its own, one to each server it needs."""

    kind, artifact = "redis", "chunk"

    def __init__(self, endpoint: Endpoint, app: str) -> None:
        self._endpoint, self._app = endpoint, app
        self._lines: dict[int, Line] = {}

    def has(self, tensor: Tensor, shard: Shard) -> bool:  # noqa: ARG002 (of any tensor)
        """See `Transport.has`."""
        return any(source.kind == self.kind for source in shard.sources)

    def read(self, tensor: Tensor, shard: Shard, into: memoryview, tick: Tick) -> None:
        """See `Transport.read`."""
        sources = [source for source in shard.sources if source.kind == self.kind]
        for left, source in zip(range(len(sources) - 1, -1, -1), sources, strict=True):
            try:
                self._read(tensor, shard, source, into, tick)
                return
            except ShardGone:
                if not left:
                    raise

    def _read(
        self, tensor: Tensor, shard: Shard, source: Source, into: memoryview, tick: Tick
    ) -> None:
        prefix = str(source.where["prefix"])
        count = chunk_count(len(into))
        asked: deque[Line] = deque()
        sent = 0
        try:
            for k in range(count):
                while sent < min(count, k + AHEAD):
                    key = chunk_key(self._app, prefix, sent)
                    line = self._line(key)
                    line.send("GET", key)
                    asked.append(line)
                    sent += 1
                raw = asked.popleft().receive()
                part = into[k * CHUNK_BYTES : (k + 1) * CHUNK_BYTES]
                if raw is None or len(raw) != len(part):
                    raise ShardGone(
                        f"{tensor.name}{shard.box}: chunk {k} of {count} is "
                        + ("not in Redis" if raw is None else
                           f"of {len(raw):,} bytes, and {len(part):,} were expected")
                    )  # fmt: skip
                part[:] = raw
                tick()
        except BaseException:
            # Answers may still be on their way: nobody must read them as others'.
            self.close()
            raise

    def _line(self, key: str) -> Line:
        pool = self._endpoint.pool(key)
        line = self._lines.get(id(pool))
        if line is None:
            line = self._lines[id(pool)] = Line(pool, read_bytes=CHUNK_BYTES)
        return line

    def close(self) -> None:
        """See `Transport.close`."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()
        self._endpoint.forget()
