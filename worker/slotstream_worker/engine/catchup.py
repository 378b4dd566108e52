"""Catching up: a launch that runs several waiting frames of each of its sessions.

Where frames wait, whether in a backlog or in a replay, a launch a frame pays for gathering,
scattering and bookkeeping each time. One launch that loops over the frames pays once. Its body is
the same step, but it is compiled as another program, which may round otherwise: so it is used only
where it has been seen to give the bits of launches of one frame each.

One program does for any number of frames up to `CatchUp.frames`, since the number is an argument
of its loop.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slotstream_worker.engine.launch import Launched, Launcher
from slotstream_worker.engine.pool import Pool

log = logging.getLogger(__name__)

FRAMES = 16
"""Frames of a session that one launch runs, at most."""
ROWS = (16, 128)
"""Rows of such a launch, at least and at most: more are hardly cheaper, few sessions fill them."""
_WORTH = 1.5
"""How much dearer a row may be in a smaller launch that is preferred all the same."""
_LONGEST_MS = 100.0
"""What such a launch may take: whoever comes meanwhile waits for it."""
_BYTES = 32 * 2**20
"""Frames that such a launch takes in, at most."""


@dataclass(frozen=True)
class CatchUp:
    """Launches of `rows` rows that run up to `frames` frames of each."""

    rows: int
    frames: int

    @property
    def least(self) -> int:
        """Sessions from which it is worth its while."""
        return (self.rows + 1) // 2


def ways(launcher: Launcher, pool: Pool, cost_ms: Mapping[int, float]) -> list[CatchUp]:
    """The launches to catch up with, the smallest first; none where they would round otherwise.

    Runs on an empty pool, which is empty again afterwards.

    Args:
        launcher: compiles the programs.
        pool: what they run on.
        cost_ms: milliseconds of a launch of one frame, by row count.
    """
    low, high = ROWS
    counts = [rows for rows in cost_ms if low <= rows <= high]
    # On a device where more rows cost nothing, many at a time; with few slots, all of them.
    each = {rows: ms / rows for rows, ms in cost_ms.items()}
    cheap = [rows for rows in each if each[rows] <= _WORTH * min(each.values())]
    counts = sorted({*counts, max([r for r in cheap if r <= high], default=min(cheap))})
    found = (_way(launcher, pool, rows, cost_ms[rows]) for rows in counts)
    return [way for way in found if way]


def _way(launcher: Launcher, pool: Pool, rows: int, ms: float) -> CatchUp | None:
    """A launch of `rows` rows to catch up with; None where there is no exact or quick one.

    `ms`: what a launch of so many rows and one frame takes.
    """
    model = launcher.model
    frame_bytes = max(int(np.prod(model.frame_shape)) * model.dtype.itemsize, 1)
    most = min(FRAMES, int(_LONGEST_MS / max(ms, 1e-3)), _BYTES // (rows * frame_bytes))
    if most < 2 or not _agrees(launcher, pool, CatchUp(rows, most)):
        return None
    return CatchUp(rows, most)


def _agrees(launcher: Launcher, pool: Pool, way: CatchUp) -> bool:
    """Whether several frames in one launch give the bits of as many launches."""
    sessions = list(range(min(way.rows, pool.slots)))
    rng = np.random.default_rng(20_240_608)
    first = launcher.model.random_frames(rng, (way.rows,))
    frames = launcher.model.random_frames(rng, (way.rows, way.frames))
    counts = (way.frames, 2)
    singly: list[Any] = []
    together: list[Any] = []
    try:
        for count in counts:
            pool.admit(sessions)
            _commit(pool, launcher.launch(pool, pool.plan(sessions, rows=way.rows), first))
            plan = pool.plan(sessions, rows=way.rows)
            outputs = _commit(pool, launcher.launch_far(pool, plan, frames, count))
            together += [*map(_bytes, outputs.values()), pool.read(sessions)]
            pool.release(sessions)
        for count in counts:
            pool.admit(sessions)
            _commit(pool, launcher.launch(pool, pool.plan(sessions, rows=way.rows), first))
            steps = []
            for k in range(count):
                plan = pool.plan(sessions, rows=way.rows)
                block = np.ascontiguousarray(frames[:, k])
                steps.append(_commit(pool, launcher.launch(pool, plan, block)))
            singly += [_bytes(np.stack([s[name] for s in steps], axis=1)) for name in steps[0]]
            singly.append(pool.read(sessions))
            pool.release(sessions)
    except Exception as error:  # whatever the compiler makes of it: it is only a faster way
        log.warning("frames are launched one by one: %s", error)
        pool.release(sessions)
        return False
    return singly == together


def _commit(pool: Pool, launched: Launched) -> dict[str, np.ndarray[Any, Any]]:
    outputs = launched.wait()
    pool.commit([(launched.plan, launched.rows)])
    return outputs


def _bytes(array: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()
