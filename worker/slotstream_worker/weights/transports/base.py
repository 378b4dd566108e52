"""What a transport is: it fills a buffer with a shard's bytes, and says what it can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from slotstream_worker.weights.manifest import Shard, Tensor

Tick = Callable[[], None]
"""Called between pieces of a transfer, so that leases are renewed and a stop is heeded."""


class Transport(Protocol):
    """One way for bytes to come.

    `kind` is the source kind of a manifest that it reads; `artifact` says what is moved (`chunk`,
    `file range`, `shard`), for the capabilities a worker declares.
    """

    kind: str
    artifact: str

    def has(self, tensor: Tensor, shard: Shard) -> bool:
        """Whether a shard can be had this way."""

    def read(self, tensor: Tensor, shard: Shard, into: memoryview, tick: Tick) -> None:
        """Fill `into`, as long as the shard, with its bytes.

        Raises:
            ShardGone: the bytes are not there, or too few or too many.
            redis.RedisError, OSError: a condition that passes.
        """

    def close(self) -> None:
        """Give connections and files back."""
