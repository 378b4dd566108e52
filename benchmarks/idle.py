"""What sessions cost that are open and idle: processor time, and memory of the worker's process.

The bound: an idle worker sleeps on a socket and wakes to renew its lease, and to sweep, which in
every five seconds compares each session with its row and its stream: for 10,000 sessions 40 calls
of a script, which looks at one row and one stream a session. A session's memory beside its state
row (which lies in the pool, there from the start): the objects that stand for it, a few hundred
bytes each.

Memory is a slope: the process's resident bytes with all sessions less those with a fifth of them,
by the difference of the two, so that what every process has falls out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from benchmarks.backlog import Backlog
from benchmarks.measure import Figure, Run, Spread
from benchmarks.model import frames_of
from benchmarks.processes import (
    Process,
    cpu_s,
    open_sessions,
    resident,
    why_no_proc,
    worker_process,
)
from slotstream.embedded import EmbeddedRedis

SESSIONS, AT_A_TIME, SWEEP_S = 10_000, 250, 5.0


def idle(run: Run) -> Iterator[Figure]:
    """A worker's process with 10,000 open sessions, each of which has run one frame."""
    if reason := why_no_proc():
        run.skip("idle", reason)
        return
    sessions = run.pick(SESSIONS, 500)
    names = [f"s{k}" for k in range(sessions)]
    with (
        EmbeddedRedis() as redis,
        worker_process(redis.url, "idle", slots=sessions) as process,
        run.task("idle sessions", 3 + run.repeats) as advance,
    ):
        first = _run_one_each(process, redis.url, names[: sessions // 5])
        advance()
        last = _run_one_each(process, redis.url, names[sessions // 5 :])
        advance()
        yield Figure(
            "memory.worker",
            f"memory of the worker's process a session, slope to {sessions:,}",
            "",
            Spread.of([(last - first) / (sessions - sessions // 5)]),
            unit="B",
            better="less",
            note="too few sessions to say" if sessions < SESSIONS else "",
        )
        shares: dict[str, list[float]] = {"worker": [], "redis": []}
        pids = {"worker": process.pid, "redis": redis.pid}
        for _ in range(run.repeats):
            before, start = {name: cpu_s(pid) for name, pid in pids.items()}, time.perf_counter()
            time.sleep(run.pick(2 * SWEEP_S, 1.0))
            passed = time.perf_counter() - start
            for name, pid in pids.items():
                shares[name].append(100 * (cpu_s(pid) - before[name]) / passed)
            advance()
    for name, what in (("worker", "idle.cpu"), ("redis", "idle.redis")):
        yield Figure(
            f"{what}.{sessions}",
            f"{name}, {sessions:,} idle sessions: share of a core",
            "",
            Spread.of(shares[name]),
            unit="%",
            better="less",
        )


def _run_one_each(process: Process, url: str, names: list[str]) -> int:
    """Open sessions, run a frame of each, read and trim the replies; resident bytes then.

    A few at a time: what many frames at once take while they run is not a session's memory.
    """
    for start in range(0, len(names), AT_A_TIME):
        part = names[start : start + AT_A_TIME]
        open_sessions(process, url, "idle", part)
        backlog = Backlog(url, "idle", part, frames_of(16))
        backlog.fill(1)
        process.wait_until(partial(_answered, backlog), "all were answered")
        backlog.trim()
        backlog.close()
    time.sleep(SWEEP_S)  # checkpoints are written, and a sweep has been
    return resident(process.pid)


def _answered(backlog: Backlog) -> bool:
    return backlog.replies() >= 2 * len(backlog.sessions)  # `opened`, and the reply
