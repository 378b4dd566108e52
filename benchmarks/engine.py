"""The engine alone: what rows in and rows out cost over the bare step, and what idle rows cost.

The bound: the bare jitted step at its best row count, with its rows on the device and its outputs
left there. A round does beside it, for each row: copy 1,600 bytes in, gather and scatter a row of
1,064 bytes, copy 400 bytes out; and for each launch: one call, one scatter. No round trips. A
round's cost is by its active rows; sessions that are open and idle should cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle

import numpy as np

from benchmarks import bare
from benchmarks.measure import Figure, Run, clock, dearer
from benchmarks.model import FRAME, frames_of, model
from benchmarks.report import sessions_of
from slotstream_worker.engine.engine import Engine

SESSIONS = (1, 16, 64, 256, 1024, 4096, 16_384)
SHARES = ((1.0, "all active"), (0.1, "10 % active"), (0.01, "1 % active"))
_BACKLOG_FROM = 256
DRAWS = 8
"""Rounds rotate through so many random choices of who is active."""


def active_of(sessions: int, share: float) -> int:
    """How many of the sessions are active; 0 where a share is less than one of them."""
    active = round(sessions * share)
    return active if share == 1.0 or 1 <= active < sessions else 0


def draws(sessions: int, active: int) -> list[list[int]]:
    """Who is active, several times over."""
    rng = np.random.default_rng(2)
    if active == sessions:
        return [list(range(sessions))]
    return [[int(k) for k in rng.permutation(sessions)[:active]] for _ in range(DRAWS)]


def served(sessions: int, row_counts: tuple[int, ...] | None = None) -> Engine:
    """An engine with that many sessions, all of which have left rest."""
    engine = Engine(model(), sessions)
    engine.prepare(row_counts)
    engine.pool.admit(range(sessions))
    engine.run(list(range(sessions)), frames_of(sessions))
    return engine


def rounds(engine: Engine, sessions: int, active: int) -> Callable[[], None]:
    """A round of `active` of the sessions, others each time: frames in, outputs on the host."""
    frames, turns = frames_of(active), cycle(draws(sessions, active))

    def act() -> None:
        engine.finish(engine.begin(next(turns), frames))

    return act


def backlog(engine: Engine, sessions: int) -> tuple[Callable[[], None], int]:
    """A round of several frames of each of some sessions, as a backlog is run; and its frames."""
    way = max((w for w in engine.catch_up if w.rows <= sessions), key=lambda way: way.rows)
    parts = cycle([list(range(start, start + way.rows)) for start in range(0, sessions, way.rows)])
    frames = frames_of(way.rows * way.frames).reshape(way.rows, way.frames, FRAME, -1)

    def act() -> None:
        engine.finish(engine.begin_far(next(parts), frames))

    return act, way.rows * way.frames


def engine(run: Run) -> Iterator[Figure]:
    """Whole rounds against the bare step, over sessions and over the share that is active."""
    step = bare.best(run, model())
    for sessions in run.pick(SESSIONS, (64, 1024)):
        held = served(sessions)
        things = {"bare": step.thing}
        for share, name in SHARES:
            if active := active_of(sessions, share):
                things[name] = clock(rounds(held, sessions, active), active)
        if any(way.rows <= sessions for way in held.catch_up) and sessions >= _BACKLOG_FROM:
            things["backlog"] = clock(*backlog(held, sessions))
        times = run.alternate(f"engine, {sessions_of(sessions)}", things)
        if "backlog" in times:
            yield bare.against(
                times,
                "backlog",
                step,
                key=f"engine.{sessions}.backlog",
                a=f"rounds of several frames each, {sessions_of(sessions)}",
                series="a backlog",
                sessions=sessions,
            )
        for share, name in SHARES:
            if name in times:
                yield bare.against(
                    times,
                    name,
                    step,
                    key=f"engine.{sessions}.{share:g}",
                    a=f"round of {sessions:,}, {name}",
                    series=name,
                    sessions=sessions,
                )


def occupancy(run: Run) -> Iterator[Figure]:
    """A round of 16 active among 1,024 open sessions against 16 among 16, same row counts."""
    many = served(1024)
    few = served(16, tuple(c for c in many.row_counts if c <= 16) or many.row_counts)
    things = {
        "many": clock(rounds(many, 1024, 16), 16),
        "few": clock(rounds(few, 16, 16), 16),
    }
    times = run.alternate("occupancy", things)
    yield dearer(
        times, "many", "few", key="occupancy", a="round of 16 of 1,024 sessions", b="of 16 of 16"
    )
