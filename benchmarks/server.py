"""`StreamServer` against sparx's, the nearest relative: both in one process, with futures.

The bound: the engine's round (`engine.py`) plus, for each frame, one future made, set and read,
one copy of 1,600 bytes in and one of 400 out. sparx advances every slot on every step and keeps
rows with a select, so its cost is by the slots that exist; ours is by the rows that run.

Both serve the very same Flax module with the same variables, so that only the server differs. A
frame is timed from `submit` to `result`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

from benchmarks.bare import BareStep
from benchmarks.engine import SESSIONS, SHARES, active_of, draws
from benchmarks.measure import Figure, Run, Thing, clock, faster
from benchmarks.model import (
    FRAME,
    SIZES,
    frames_of,
    model,
    sparx_model,
    sparx_server,
    why_no_sparx,
)
from benchmarks.report import sessions_of
from slotstream_worker import StreamServer, models


def stream(server: Any, sessions: int, active: int, *, opened: list[int]) -> Callable[[], None]:
    """A frame of `active` of the sessions, others each time: submitted, run, and read."""
    frames, turns = frames_of(active), cycle(draws(sessions, active))

    def act() -> None:
        futures = [
            server.submit(opened[k], frame) for k, frame in zip(next(turns), frames, strict=True)
        ]
        server.run()
        for future in futures:
            future.result()

    return act


def opened_on(server: Any, sessions: int) -> list[int]:
    """Open sessions, and run a frame of each, so that all have left rest."""
    opened = [server.open() for _ in range(sessions)]
    stream(server, sessions, sessions, opened=opened)()
    return opened


def server(run: Run) -> Iterator[Figure]:
    """Both servers over sessions and over the share of them that is active."""
    if reason := why_no_sparx():
        run.skip("server", reason)
        return
    module, variables = sparx_model()
    same = models.linen(module, variables, frame=FRAME, sample_shape=SIZES[:1])
    yield _models(run, same)
    for sessions in run.pick(SESSIONS, (64, 1024)):
        shares = [(active_of(sessions, share), name) for share, name in SHARES]
        if sessions == 1024:
            shares.append((16, "16 active"))
        ours, theirs = StreamServer(same, slots=sessions), sparx_server(sessions)
        for active, name in shares:
            if not active:
                continue
            things: dict[str, Thing] = {}
            for label, one in (("ours", ours), ("sparx", theirs)):
                opened = list(one.sessions) or opened_on(one, sessions)
                things[label] = clock(stream(one, sessions, active, opened=opened), active)
            times = run.alternate(f"server, {sessions_of(sessions)}, {name}", things)
            yield faster(
                times,
                "ours",
                "sparx",
                key=f"server.{sessions}.{active}",
                a=f"StreamServer, {sessions_of(sessions)}, {name}",
                b="sparx's StreamServer",
            ).at("server", name, sessions)


def _models(run: Run, theirs: Any) -> Figure:
    """The bare step of this suite's model and of sparx's: where they differ, so do later ratios."""
    things = {"ours": BareStep(model(), 256).thing, "sparx": BareStep(theirs, 256).thing}
    return faster(
        run.alternate("the two models", things),
        "ours",
        "sparx",
        key="server.models",
        a="bare step of this suite's model",
        b="bare step of the same built with sparx",
    )
