"""Models with randomness: a key a session, which is state like any other.

A session's key is drawn from its id and a seed, so a replay on another worker draws the same
numbers, and so does a session that is opened again under the same id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from slotstream_worker.engine.errors import CannotStream
from slotstream_worker.engine.state import StateSpec, Tree

KEY_DTYPE, KEY_SHAPE = np.dtype(np.uint32), (2,)


@dataclass(frozen=True)
class Seeding:
    """How sessions of a model start: `start(1)` with the state leaf `path` set to their key.

    `path` is as `slotstream check` prints it, without brackets and quotes: `key`, `cell.key`.
    """

    seed: int
    path: str
    start: Callable[[int], Tree]


def key_of(seed: int, session: Hashable) -> np.ndarray[Any, Any]:
    """A session's key, uint32 `[2]`, as `jax.random.wrap_key_data` takes it (threefry2x32).

    The first 8 bytes of the SHA-256 of `<seed>:<session id>`, as two little-endian numbers.
    """
    digest = hashlib.sha256(f"{seed}:{session}".encode()).digest()
    return np.frombuffer(digest[:8], "<u4").astype(KEY_DTYPE)


def rest_rows(name: str, spec: StateSpec, seeding: Seeding) -> Callable[[Hashable], bytes]:
    """The row that a session starts from, by its id.

    Raises:
        CannotStream: the state has no such leaf, or it is no key.
    """
    plain = [leaf.path.replace("']['", ".").strip("[']") for leaf in spec.leaves]
    if seeding.path not in plain:
        raise CannotStream(
            f"{name} cannot be served: its state has no leaf {seeding.path!r} for the random key; "
            f"it has {', '.join(plain) or 'none'}"
        )
    at = plain.index(seeding.path)
    leaf = spec.leaves[at]
    if (leaf.dtype, leaf.shape) != (KEY_DTYPE, KEY_SHAPE):
        raise CannotStream(
            f"{name} cannot be served: a random key is state of uint32[2], as "
            f"jax.random.key_data gives it, and {seeding.path!r} is {leaf.dtype}{list(leaf.shape)}"
        )
    one = [np.asarray(array) for array in spec.from_model(seeding.start(1))]

    def row(session: Hashable) -> bytes:
        arrays = [key_of(seeding.seed, session)[None] if k == at else a for k, a in enumerate(one)]
        return spec.pack(arrays, 1)[0]

    return row


def started(spec: StateSpec, row: bytes) -> Tree:
    """A row as the model's own state for a batch of one."""
    return spec.to_model([jax.numpy.asarray(array) for array in spec.unpack([row])])
