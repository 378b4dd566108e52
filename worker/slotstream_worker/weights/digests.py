"""Digests of shards: SHA-256 over the SHA-256 of each MiB, so that a shard is hashed in parts.

Parts may be hashed side by side (hashing leaves the interpreter to others), and as they come.
"""

from __future__ import annotations

import hashlib

BLOCK_BYTES = 2**20


def digest(data: bytes | bytearray | memoryview) -> str:
    """Digest of a shard's bytes, 64 hexadecimal digits."""
    view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
    whole = hashlib.sha256()
    for start in range(0, max(len(view), 1), BLOCK_BYTES):
        whole.update(hashlib.sha256(view[start : start + BLOCK_BYTES]).digest())
    return whole.hexdigest()
