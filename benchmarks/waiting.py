"""What it gives and costs that a round waits for company (`--round-wait-ms`), at a fixed rate.

The bound: a frame that comes alone waits so long and no longer, which is added to its latency; a
launch and a script call are made for as many frames as come meanwhile, which saves the processor
what those cost beside the frames themselves. A round that is full waits for nobody.

A greedy worker and those that wait, each with a Redis of its own, are given the same schedule in
turn. Loads are shares of what the greedy one answers of live sessions (`latency.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np

from benchmarks.latency import Live
from benchmarks.measure import Figure, Run, larger
from benchmarks.processes import cpu_s, why_no_proc, worker_process
from benchmarks.report import sessions_of
from slotstream.embedded import EmbeddedRedis

SESSIONS, WAITS_MS, LOADS = 100, (2, 5), (10, 50)


def waiting(run: Run) -> Iterator[Figure]:
    """Latency, and processor time a frame, of rounds that wait against those that do not."""
    if reason := why_no_proc():
        run.skip("waiting", reason)
        return
    with ExitStack() as stack:
        lives = {}
        for wait_ms in (0, *WAITS_MS):
            redis = stack.enter_context(EmbeddedRedis())
            process = worker_process(
                redis.url, "live", "--round-wait-ms", str(wait_ms), slots=SESSIONS
            )
            stack.enter_context(process)
            lives[wait_ms] = Live.start(redis.url, process, SESSIONS)
        rates_hz = [1e6 / (live.capacity(run.pick(3, 1)).a_value or 1.0) for live in lives.values()]
        rate_hz = rates_hz[0]  # that of the greedy one; the others have been warmed up like it
        for load in LOADS:
            yield from _at(run, lives, load, rate_hz * load / 100)
        for live in lives.values():
            live.backlog.close()


def _at(run: Run, lives: dict[int, Live], load: int, rate_hz: float) -> Iterator[Figure]:
    warm_s, seconds = run.pick(1.0, 0.3), run.pick(5.0, 1.3)
    repeats = run.pick(max(3, run.repeats // 2), 2)
    seen: dict[int, list[tuple[float, float, float]]] = {wait_ms: [] for wait_ms in lives}
    with run.task(f"waiting, at {load} %", repeats * len(lives)) as advance:
        for seed in range(repeats):
            for wait_ms, live in lives.items():
                before = cpu_s(live.process.pid)
                heard = live.worker(rate_hz, seconds, warm_s, seed)
                us = 1e6 * (cpu_s(live.process.pid) - before) / (rate_hz * seconds)
                p50, p99 = np.percentile(heard.latency_ms, [50.0, 99.0], method="higher")
                seen[wait_ms].append((float(p50), float(p99), us))
                advance()
    for k, (what, of) in enumerate((("p50", "ms"), ("p99", "ms"), ("cpu", "us a frame"))):
        greedy = np.asarray([one[k] for one in seen[0]])
        for wait_ms in WAITS_MS:
            mine = np.asarray([one[k] for one in seen[wait_ms]])
            named = "processor time" if what == "cpu" else f"push to reply {what}"
            yield larger(
                mine,
                greedy,
                key=f"waiting.{wait_ms}.{load}.{what}",
                a=f"{named}, rounds waiting {wait_ms} ms, {sessions_of(SESSIONS)} at {load} % "
                f"({rate_hz:,.0f}/s)",
                b="greedy",
                of=of,
            )
