"""What checkpoints cost: frames a second with them against frames a second without.

The bound: for each session and interval one row read from the device (a gather), `row` bytes over
the socket, one HSET of them and one XTRIM of the frames they cover. State goes out within a budget
of 64 MiB a second (the worker's default), so large rows at short intervals are spread out in time
rather than written as often as asked: the cost has a ceiling.

Each worker works for a little more than two intervals at a time (one of 10 s), on a backlog.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.growth import size_of
from benchmarks.hosting import Hosting
from benchmarks.measure import Figure, Run, Thing, faster
from benchmarks.model import with_rows_of
from slotstream.embedded import EmbeddedRedis

ROWS = ((1024, 256), (64 * 1024, 64), (2**20, 16))
"""Bytes of a state row, and sessions that have one."""
INTERVALS = (0.1, 1.0, 10.0)
NEVER = 86_400.0


def checkpoint(run: Run) -> Iterator[Figure]:
    """Throughput against the interval, for rows of three sizes."""
    for row, sessions in run.pick(ROWS, ROWS[:2]):
        served = with_rows_of(row)
        intervals = run.pick(INTERVALS, INTERVALS[:2])
        things: dict[str, Thing] = {}
        hostings = []
        with EmbeddedRedis() as redis:
            for interval in (*intervals, NEVER):
                hosting = Hosting(
                    redis.url,
                    f"every{interval:g}".replace(".", "-"),
                    sessions,
                    served=served,
                    checkpoint_interval_s=interval,
                )
                hostings.append(hosting)
                if interval == NEVER:
                    _look_saved(hosting, row)
                least_s = 2.2 if interval == NEVER else max(run.pick(2.0, 0.5), 2.2 * interval)
                things[f"{interval:g}"] = _at_work(hosting, min(least_s, 11.0), interval)
            times = run.alternate(
                f"checkpoints of {size_of(row)}", things, repeats=min(run.repeats, 5)
            )
            for hosting in hostings:
                hosting.close()
        for interval in intervals:
            figure = faster(
                times,
                f"{interval:g}",
                f"{NEVER:g}",
                key=f"checkpoint.{size_of(row).replace(' ', '')}.{interval:g}",
                a=f"checkpoints every {interval:g} s, rows of {size_of(row)}, {sessions} sessions",
                b="none",
            )
            yield figure.at("checkpoint", f"rows of {size_of(row)}", interval)


def _look_saved(hosting: Hosting, row: int) -> None:
    """Give rows of the slot table a state, never read, as they have where checkpoints are written.

    Redis keeps a hash with a large field as a table, one without as a list: only the writing of
    checkpoints is to differ.
    """
    for name in hosting.names:
        key = hosting.backlog.keys.row(name)
        hosting.backlog.connection.call("HSET", key, "state", bytes(row))


def _at_work(hosting: Hosting, least_s: float, interval: float) -> Thing:
    deep = max(8, 8_192 // len(hosting.names))

    def measure() -> float:
        hosting.settle(saved=interval != NEVER)
        return hosting.work_for(least_s, deep, trim_inbox=interval == NEVER)

    return measure
