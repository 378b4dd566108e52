"""How many sessions a device holds, by its memory."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from slotstream_worker.engine.engine import Engine

SPARE = 0.1
"""Part of the memory that is left to the device's own."""


def memory_bytes() -> int:
    """Bytes of memory of the device that JAX computes on; of a CPU, what the host has free."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        return int(limit)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def sessions(engine: Engine, memory: int) -> int:
    """Slots that `memory` bytes hold beside the weights and what the largest launch needs."""
    model, spec = engine.model, engine.model.spec
    rows = max(engine.row_counts, default=1)
    frame = int(np.prod(model.frame_shape)) * model.dtype.itemsize
    outputs = sum(int(np.prod(o.shape)) * o.dtype.itemsize for o in model.outputs)
    launch = 2 * rows * (frame + outputs + 2 * spec.row_bytes)
    left = int(memory * (1 - SPARE)) - nbytes(model.variables) - launch
    return max(left // spec.row_bytes, 0) if spec.row_bytes else 0


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree."""
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(tree))
