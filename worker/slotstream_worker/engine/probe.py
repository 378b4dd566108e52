"""Which row counts to launch with: found by measuring, on this device, for this model.

In one compiled shape a row's result does not depend on its position or on its neighbours;
between shapes it can, since a matrix product may reduce in another order, and a spike threshold
turns one last bit into a different spike train. So the row counts are put into groups that agree
bit for bit, and only one group is used: then no session can tell who else is served, and a
replay after a crash is exact.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from slotstream_worker.engine.cover import Cover
from slotstream_worker.engine.distance import apart
from slotstream_worker.engine.errors import CannotStream
from slotstream_worker.engine.launch import Launcher
from slotstream_worker.engine.pool import Plan, Pool

ROWS = 32
"""Sessions that the probe follows through every row count."""
FRAMES = 3
"""Frames each of them runs: one from rest and two that continue."""
LADDER = 4
"""Ratio of one candidate row count to the next."""
HALF = 128
"""One more: half of what is often the best, so that one round can be formed while another runs."""
TOP = 1024
"""The largest candidate on a CPU, where small launches are the faster ones."""
_ROUNDS, _REPEATS = 3, 3
_ROUNDING = 1e-3
"""A difference up to this, of the largest value, is put down to rounding."""

Arrays = list[np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Measured:
    """What the probe saw of one row count: `digest` of all it computed, `ms` a launch.

    `steady` is False where a row's result depended on its position or its neighbours, and `off` is
    then by how much, of the largest value.
    """

    count: int
    ms: float
    digest: str
    steady: bool
    off: float = 0.0


@dataclass(frozen=True)
class Probe:
    """The row counts chosen, the digest they agree on, and everything that was measured."""

    row_counts: tuple[int, ...]
    digest: str
    measured: tuple[Measured, ...]

    @property
    def cover(self) -> Cover:
        """How the chosen counts make up a round."""
        return Cover({m.count: m.ms for m in self.measured if m.count in self.row_counts})

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Row counts that agree bit for bit, the fit ones only."""
        digests = dict.fromkeys(m.digest for m in self.measured if m.steady)
        return [
            tuple(m.count for m in self.measured if m.steady and m.digest == digest)
            for digest in digests
        ]


def candidates(slots: int, *, top: int = TOP) -> list[int]:
    """Row counts worth measuring for a pool of `slots`: 1, 4, 16, ..., 128, one that holds all."""
    largest = min(1 << (slots - 1).bit_length(), top)
    counts = [1]
    while counts[-1] * LADDER < largest:
        counts.append(counts[-1] * LADDER)
    return sorted({*counts, largest, *([HALF] if largest > HALF else [])})


def probe(
    launcher: Launcher,
    pool: Pool,
    counts: Iterable[int],
    *,
    progress: Callable[[int], None] = lambda _count: None,
) -> Probe:
    """Measure each row count and choose the group that agrees bitwise and costs least.

    Args:
        launcher: what will launch; the row counts are compiled in it.
        pool: the pool it will launch on, still empty; it is empty again afterwards.
        counts: the candidates.
        progress: called with each row count before it is compiled.

    Raises:
        CannotStream: with every row count a row's result depends on its neighbours.
    """
    if len(pool):
        raise RuntimeError(f"the probe needs an empty pool, and this one holds {len(pool)} rows")
    measured = []
    for count in sorted(set(counts)):
        progress(count)
        measured.append(_measure(launcher, pool, count))
    # Several times round, the least of each: what else the machine does comes and goes, and only
    # ever adds.
    least = {m.count: float("inf") for m in measured}
    for _ in range(_ROUNDS):
        for count, ms in least.items():
            least[count] = min(ms, _time(launcher, pool, count))
    measured = [replace(m, ms=least[m.count]) for m in measured]
    found = Probe((), "", tuple(measured))
    # A launch of one row has no company, so it says nothing about a model that mixes rows.
    shared = [m.steady for m in measured if m.count > 1]
    if not found.groups or (shared and not any(shared)):
        raise CannotStream(f"{launcher.model.name} cannot be served: {_why(found)}")
    chosen = min(found.groups, key=lambda group: _burden(found, group, pool.slots))
    digest = next(m.digest for m in measured if m.count in chosen)
    return Probe(chosen, digest, tuple(measured))


def _why(found: Probe) -> str:
    """What it means that no row count gives a row the same bits in any company."""
    off = max(m.off for m in found.measured if not m.steady)
    if off > _ROUNDING:
        return (
            "a session's outputs depend on the other sessions in the batch (by up to "
            f"{off:.2g} of the largest value). A model that normalises or mixes over the batch "
            "axis cannot be served; use its running statistics (train=False) instead"
        )
    tried = ", ".join(str(m.count) for m in found.measured)
    return (
        f"with launches of {tried} rows a session's outputs are rounded by its place in the "
        f"batch (by up to {off:.2g} of the largest value), so that a replay would not be exact. "
        "Other row counts may do: try --row-counts 2,8,32"
    )


def _burden(found: Probe, group: Sequence[int], slots: int) -> float:
    """How much dearer rounds of few and of many rows are with `group` than with any count."""
    free = Cover({m.count: m.ms for m in found.measured})
    held = Cover({m.count: m.ms for m in found.measured if m.count in group})
    loads = {1, min(16, slots), max(slots // 4, 1), slots}
    return sum(held.cost(n) / free.cost(n) for n in loads)


def _measure(launcher: Launcher, pool: Pool, count: int) -> Measured:
    straight = _run(launcher, pool, count, seed=1)
    shuffled = _run(launcher, pool, count, seed=2)
    digest, steady = _digest(straight), _digest(straight) == _digest(shuffled)
    off = 0.0 if steady else _apart(straight, shuffled)
    return Measured(count, 0.0, digest, steady, off)


def _apart(one: list[Arrays], other: list[Arrays]) -> float:
    """The largest difference of two runs, of their largest value."""
    largest, scale = apart(zip(chain(*one), chain(*other), strict=True))
    return largest / scale if scale else float(largest > 0)


def _run(launcher: Launcher, pool: Pool, count: int, seed: int) -> list[Arrays]:
    """Every followed session's outputs and last state, in launches of `count` rows.

    Where a session sits, and who sits beside it, comes from `seed`; some neighbours are NaN.
    """
    model = launcher.model
    # The followed sessions' frames are the same for every count, every seed and every worker.
    streams = model.random_frames(np.random.default_rng(20_240_607), (FRAMES, ROWS))
    rng = np.random.default_rng(seed)
    order = [int(k) for k in rng.permutation(ROWS)]
    together = min(count, pool.slots)
    groups = [order[start : start + together] for start in range(0, ROWS, together)]
    seats = [rng.permutation(count)[: len(group)] for group in groups]
    results: list[Arrays] = [[] for _ in range(ROWS)]
    states = [b""] * ROWS
    for frames in streams:
        for group, seat in zip(groups, seats, strict=True):
            block = model.random_frames(rng, (count,))
            strangers = np.setdiff1d(np.arange(count), seat)
            if np.issubdtype(model.dtype, np.inexact) and len(strangers) and seed % 2 == 0:
                block[strangers[0]] = np.nan
            block[seat] = frames[group]
            pool.admit(group)
            pool.write({k: states[k] for k in group})
            # A plan of the probe's own: it seats rows where a pool would not.
            indices = np.full(count, pool.sink, np.int32)
            indices[seat] = [pool.sessions[k] for k in group]
            plan = Plan(tuple(range(count)), indices, np.full(count, pool.has_state(group[0])),
                        np.zeros(count, np.int64))  # fmt: skip
            ran = launcher.launch(pool, plan, block)
            outputs = ran.wait()
            after = model.spec.pack([np.asarray(array)[seat] for array in ran.rows], len(group))
            for k, place, state in zip(group, seat, after, strict=True):
                results[k] += [np.ascontiguousarray(array[place]) for array in outputs.values()]
                states[k] = state
            pool.release(group)
    for parts, state in zip(results, states, strict=True):
        parts += [np.ascontiguousarray(leaf[0]) for leaf in model.spec.unpack([state])]
    return results


def _digest(results: list[Arrays]) -> str:
    digest = hashlib.sha256()
    for part in chain.from_iterable(results):
        digest.update(part.tobytes())
    return digest.hexdigest()[:16]


def _time(launcher: Launcher, pool: Pool, count: int) -> float:
    """Milliseconds of a launch of rows that continue, the commit included; the least of a few."""
    sessions = range(min(count, pool.slots))
    pool.admit(sessions)
    frames = launcher.model.random_frames(np.random.default_rng(0), (count,))
    times = []
    for repeat in range(_REPEATS + 2):
        plan = pool.plan(sessions, rows=count)
        start = time.perf_counter()
        ran = launcher.launch(pool, plan, frames)
        ran.wait()
        pool.commit([(plan, ran.rows)])
        if repeat >= 2:  # the first runs from rest, the second may still compile
            times.append(1e3 * (time.perf_counter() - start))
    pool.release(sessions)
    return min(times)
