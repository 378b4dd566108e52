"""What a frame costs as other things grow: sessions that are open and idle, and bytes a frame.

The bound for idle sessions is no cost at all: frames are found by what Redis says has changed, not
by looking. What is left grows slowly: the sweep, which every few seconds reads each stream and each
row once (about two commands a session), larger pools, larger sets. Each timing starts after a
sweep and lasts a little longer than the time to the next, so it holds one sweep, as every such
span of a worker's life does.

The bound for bytes (`bound.py`): each byte of a frame crosses one socket and is copied into a
block for the device; two copies on each side of the socket, one on the way to the device.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.backlog import Backlog
from benchmarks.bound import WireBound
from benchmarks.hosting import Hosting, random_frames_of
from benchmarks.measure import Figure, Run, Thing, dearer, faster
from benchmarks.model import with_frames_of
from benchmarks.worker import bound_loop, last_reply
from slotstream.embedded import EmbeddedRedis

OPEN, ACTIVE = (64, 256, 1024, 4096, 16_384), 64
BYTES = (64, 1024, 16 * 1024, 64 * 1024, 256 * 1024)
BACKLOG_BYTES = 64 * 2**20
"""How much is preloaded at most, over all sessions."""


def growth(run: Run) -> Iterator[Figure]:
    """Microseconds a frame of 64 active sessions among more and more that are open."""
    counts = run.pick(OPEN, (64, 1024))
    sweep_s = run.pick(5.0, 0.5)
    with EmbeddedRedis() as redis:
        hostings = {
            count: Hosting(redis.url, f"open{count}", count, active=ACTIVE, sweep_s=sweep_s)
            for count in counts
        }
        things: dict[str, Thing] = {
            str(count): _between_sweeps(hosting, 1.1 * sweep_s, run.pick(128, 32))
            for count, hosting in hostings.items()
        }
        # Each repetition of each takes a whole time between sweeps.
        times = run.alternate("growth, sessions open", things, repeats=min(run.repeats, 5))
        for hosting in hostings.values():
            hosting.close()
    first = str(counts[0])
    for count in map(str, counts[1:]):
        figure = dearer(
            times,
            count,
            first,
            key=f"growth.open.{count}",
            a=f"a frame, {ACTIVE} active of {int(count):,} open",
            b=f"of {int(first):,} open",
        )
        yield figure.at("growth", "", float(count))


def payload(run: Run) -> Iterator[Figure]:
    """Microseconds a frame over bytes a frame, against the smallest and against the wire bound."""
    sizes = run.pick(BYTES, BYTES[:3])
    things: dict[str, Thing] = {}
    hostings, backlogs = [], []
    with EmbeddedRedis() as redis:
        for size in sizes:
            served = with_frames_of(size)
            deep = int(min(run.pick(256, 32), max(2, BACKLOG_BYTES // (ACTIVE * size))))
            hosting = Hosting(redis.url, f"bytes{size}", ACTIVE, served=served)
            hostings.append(hosting)
            reply = last_reply(redis.url, hosting)
            frames = random_frames_of(served)
            backlogs.append(Backlog(redis.url, f"bound{size}", hosting.names, frames))
            things[f"worker {size}"] = _from_settled(hosting, deep)
            things[f"bound {size}"] = bound_loop(WireBound(backlogs[-1], reply), deep)
        times = run.alternate("growth, bytes a frame", things)
        for one in (*hostings, *backlogs):
            one.close()
    for size in sizes:
        mine, name = f"worker {size}", size_of(size)
        if size != sizes[0]:
            yield dearer(
                times,
                mine,
                f"worker {sizes[0]}",
                key=f"payload.{size}",
                a=f"a frame of {name}, {ACTIVE} sessions",
                b=f"of {size_of(sizes[0])}",
            ).at("payload", "worker", size)
        yield faster(
            times,
            mine,
            f"bound {size}",
            key=f"payload.bound.{size}",
            a=f"worker, frames of {name}, next to no model",
            b="wire bound",
        )


def size_of(nbytes: int) -> str:
    """Bytes, for a person."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes} B"


def _between_sweeps(hosting: Hosting, least_s: float, deep: int) -> Thing:
    def measure() -> float:
        hosting.settle()
        return hosting.work_for(least_s, deep)

    return measure


def _from_settled(hosting: Hosting, deep: int) -> Thing:
    def measure() -> float:
        hosting.settle()
        return hosting.work_off(deep)

    return measure
