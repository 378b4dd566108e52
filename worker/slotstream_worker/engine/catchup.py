"""Catching up: a launch that runs several waiting frames of each of its sessions.

Where frames wait, whether in a backlog or in a replay, a launch a frame pays for gathering,
scattering and bookkeeping each time. One launch that scans over the frames pays once. Its body is
the same step, but it is compiled as another program, which may round otherwise: so it is used only
where it has been seen to give the bits of launches of one frame each.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from slotstream_worker.engine.launch import Launched, Launcher
from slotstream_worker.engine.pool import Pool

log = logging.getLogger(__name__)

FRAMES = 4
"""Frames of a session that one launch runs."""


def agrees(launcher: Launcher, pool: Pool, rows: int) -> bool:
    """Whether `FRAMES` frames in one launch of `rows` rows give the bits of as many launches.

    Runs on an empty pool, which is empty again afterwards.
    """
    sessions = list(range(min(rows, pool.slots)))
    model = launcher.model
    rng = np.random.default_rng(20_240_608)
    first, frames = model.random_frames(rng, (rows,)), model.random_frames(rng, (rows, FRAMES))
    results = []
    try:
        for together in (False, True):
            pool.admit(sessions)
            _commit(launcher, pool, sessions, rows, first)
            outputs = []
            if together:
                plan = pool.plan(sessions, rows=rows)
                launched = launcher.launch_far(pool, plan, frames)
                outputs += _bytes(launched)
                pool.commit([(plan, launched.rows)])
            else:
                steps = [
                    _commit(launcher, pool, sessions, rows, np.ascontiguousarray(frames[:, k]))
                    for k in range(FRAMES)
                ]
                outputs += [
                    np.stack([step[name] for step in steps], axis=1).tobytes() for name in steps[0]
                ]
            results.append((outputs, pool.read(sessions)))
            pool.release(sessions)
    except Exception as error:  # whatever the compiler makes of it: it is only a faster way
        log.warning("frames are launched one by one: %s", error)
        pool.release(sessions)
        return False
    return bool(results[0] == results[1])


def _commit(
    launcher: Launcher, pool: Pool, sessions: list[int], rows: int, frames: np.ndarray[Any, Any]
) -> dict[str, np.ndarray[Any, Any]]:
    plan = pool.plan(sessions, rows=rows)
    launched = launcher.launch(pool, plan, frames)
    outputs = launched.wait()
    pool.commit([(plan, launched.rows)])
    return outputs


def _bytes(launched: Launched) -> list[bytes]:
    return [np.ascontiguousarray(array).tobytes() for array in launched.wait().values()]
