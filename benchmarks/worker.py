"""The worker through Redis, its backlog preloaded: Redis and the worker share the machine.

The bound (`bound.py`): for each frame 1,600 bytes read by an XREAD of many streams and 400 written
by one XADD in a script, for each session and script call one HMGET and one HSET; a few round trips
for hundreds of frames. The worker does beside it: a round of the engine, tracking, one checkpoint
of 1,064 bytes a session and second with its trim, a lease.

Against it, in the same repetition: that wire bound, once with the fence of a session shared by
all replies that were read of it (the cheapest), once with a fence a reply (a commit a round); the
worker's own engine, the bare step, and sparx's StreamServer in one process, where it is installed.
`wire bound, then the bare step` is the sum of the two: what a worker comes to that does both at
their bounds and overlaps nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks import bare
from benchmarks.backlog import Backlog
from benchmarks.bound import WireBound
from benchmarks.engine import rounds, served
from benchmarks.hosting import Hosting
from benchmarks.lean import Connection
from benchmarks.measure import Figure, Run, Thing, clock, faster
from benchmarks.model import frames_of, model, sparx_server, why_no_sparx
from benchmarks.report import sessions_of
from benchmarks.server import opened_on, stream
from slotstream.embedded import EmbeddedRedis

SESSIONS = (64, 256, 1024, 4096)
SERIES = {
    "bound": "the wire bound",
    "rounds": "the bound, a fence a reply",
    "both": "the bound, then the bare step",
    "engine": "its engine",
    "bare": "the bare step",
    "sparx": "sparx in one process",
}
"""What the plot calls what the worker is put against."""


def worker(run: Run) -> Iterator[Figure]:
    """The worker against the wire bound and against those without Redis, over sessions."""
    if reason := why_no_sparx():
        run.skip("worker against sparx", reason)
    step = bare.best(run, model())
    for sessions in run.pick(SESSIONS, (64, 256)):
        deep = max(16, run.pick(60_000, 8_000) // sessions)
        with EmbeddedRedis() as redis:
            hosting = Hosting(redis.url, "worker", sessions)
            hosting.work_off(2)
            reply = last_reply(redis.url, hosting)
            names = {
                "worker": f"worker through Redis, {sessions_of(sessions)}",
                "bound": "wire bound",
                "rounds": "wire bound, a fence a reply",
                "engine": "its engine alone",
                "bare": f"bare step of {step.rows} rows",
                "sparx": "sparx's StreamServer in one process",
            }
            engine = served(sessions, hosting.worker.engine.row_counts)
            bounds = {
                name: _bound(redis.url, name, hosting.names, reply, depth)
                for name, depth in (("bound", 16), ("rounds", 1))
            }
            things: dict[str, Thing] = {
                "worker": _worker(hosting, deep),
                **{name: bound_loop(bound, deep) for name, bound in bounds.items()},
                "engine": clock(rounds(engine, sessions, sessions), sessions),
                "bare": step.thing,
            }
            if not why_no_sparx():
                peer = sparx_server(sessions)
                opened = opened_on(peer, sessions)
                things["sparx"] = clock(stream(peer, sessions, sessions, opened=opened), sessions)
            times = run.alternate(f"worker, {sessions_of(sessions)}", things)
            hosting.close()
            for bound in bounds.values():
                bound.backlog.close()
        times = {**times, "both": times["bound"] + times["bare"]}
        names["both"] = "wire bound, then the bare step"
        for name in (name for name in names if name in times and name != "worker"):
            key = f"worker.{name}.{sessions}"
            figure = faster(times, "worker", name, key=key, a=names["worker"], b=names[name])
            yield figure.at("worker", SERIES[name], sessions)


def last_reply(url: str, hosting: Hosting) -> tuple[bytes, bytes]:
    """`output` and `weights` of a reply as the worker writes it."""
    hosting.backlog.fill(1)
    target = hosting.answered + len(hosting.backlog.sessions)
    hosting.turn_until(lambda: hosting.answered >= target)
    connection = Connection(url)
    outbox = hosting.backlog.keys.outbox(hosting.names[0])
    ((_, flat),) = connection.call("XREVRANGE", outbox, "+", "-", "COUNT", 1)
    connection.close()
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    return fields[b"output"], fields[b"weights"]


def _worker(hosting: Hosting, deep: int) -> Thing:
    def measure() -> float:
        hosting.settle()
        return hosting.work_off(deep)

    return measure


def _bound(
    url: str, app: str, names: list[str], reply: tuple[bytes, bytes], depth: int
) -> WireBound:
    return WireBound(Backlog(url, app, names, frames_of(16)), reply, depth=depth)


def bound_loop(bound: WireBound, deep: int) -> Thing:
    """The bound over `deep` frames a session, which are deleted afterwards."""

    def measure() -> float:
        total = bound.backlog.fill(deep)
        start = time.perf_counter()
        written = bound.run(total)
        passed = time.perf_counter() - start
        if written != total:
            raise RuntimeError(f"the bound wrote {written} replies to {total} frames")
        bound.backlog.trim()
        bound.backlog.trim("in")
        return passed / total

    return measure
