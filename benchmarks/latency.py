"""Push to reply through Redis, at a fixed rate, against a bare echo through two streams.

The bound is the echo: two writes and two blocking reads, four passages of the kernel, no model.
The worker does beside it: hear that a stream has changed and read it (a round trip more), a round
of the engine, a script call; and under load a frame waits for the round before it.

Worker, echo, producer and Redis are processes of their own. Capacity is what they answer a second
together with that many sessions, each of which sends its next frame when its last is answered,
measured first, in this run. (A backlog is no measure of it: it runs many frames of a session in one
launch.) Where a load is more than was left of the cores, `not sustained` says so. Worker and echo
get the same schedule in turn. Percentiles are those of one repetition each; the figure is the
median over repetitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.backlog import Backlog
from benchmarks.bare import BareStep
from benchmarks.load import Heard, drive, in_turn
from benchmarks.measure import Figure, Run, Spread, faster, larger
from benchmarks.model import frames_of, model
from benchmarks.processes import Process, open_sessions, worker_process
from benchmarks.report import counted, sessions_of
from slotstream.embedded import EmbeddedRedis

SESSIONS, LOADS = (1, 100, 1000), (10, 50, 80)
PERCENTILES = (50.0, 99.0, 99.9)
_INBOX, _OUTBOX = "echo:in", "echo:out"


def latency(run: Run) -> Iterator[Figure]:
    """p50, p99 and p99.9 over sessions and over load."""
    for sessions in run.pick(SESSIONS, (1, 100)):
        with EmbeddedRedis() as redis, worker_process(redis.url, "live", slots=sessions) as process:
            live = Live.start(redis.url, process, sessions)
            capacity = live.capacity(run.pick(5, 2))
            yield capacity
            rate_hz = 1e6 / (capacity.a_value or 1.0)
            with Process("benchmarks.echo", redis.url, _INBOX, _OUTBOX) as echo:
                echo.wait_until(live.echoes, "it was ready")
                for load in run.pick(LOADS, (10, 50)):
                    yield from _at(run, live, load, rate_hz * load / 100)
            live.backlog.close()


@dataclass
class Live:
    """A worker's process with its sessions, and an echo's two streams, driven alike."""

    url: str
    backlog: Backlog
    process: Process

    @classmethod
    def start(cls, url: str, process: Process, sessions: int) -> Live:
        names = [f"s{k}" for k in range(sessions)]
        open_sessions(process, url, "live", names)
        return cls(url, Backlog(url, "live", names, frames_of(16)), process)

    def capacity(self, repeats: int) -> Figure:
        """Frames a second where each session sends its next one when its last is answered."""
        keys, names, taken = self.backlog.keys, self.backlog.sessions, []
        turns = int(np.clip(8_000 // len(names), 8, 800))
        for _ in range(repeats + 1):  # the first is not counted
            taken.append(
                in_turn(
                    self.url,
                    [keys.inbox(s) for s in names],
                    [keys.outbox(s) for s in names],
                    self.backlog.raw,
                    turns=turns,
                    first_id=self.backlog.next_id,
                )
            )
            self.backlog.next_id += turns * len(names)
            self.backlog.trim()
        step = BareStep(model(), min(256, max(1, len(self.backlog.sessions))))
        bare = np.asarray([step.thing() for _ in taken[1:]])
        return faster(
            {"worker": np.asarray(taken[1:]), "bare": bare},
            "worker",
            "bare",
            key=f"latency.{len(self.backlog.sessions)}.capacity",
            a=f"capacity of a worker's process, {sessions_of(len(self.backlog.sessions))}",
            b=f"bare step of {counted(step.rows, 'row')}",
        )

    def echoes(self) -> bool:
        """Whether the echo is there."""
        return bool(self.backlog.connection.call("EXISTS", _OUTBOX))

    def worker(self, rate_hz: float, seconds: float, warm_s: float, seed: int) -> Heard:
        keys, names = self.backlog.keys, self.backlog.sessions
        heard = drive(
            self.url,
            [keys.inbox(s) for s in names],
            [keys.outbox(s) for s in names],
            self.backlog.raw,
            rate_hz=rate_hz,
            seconds=seconds,
            warm_s=warm_s,
            first_id=self.backlog.next_id,
            seed=seed,
        )
        self._quiet(rate_hz * seconds)
        return heard

    def echo(self, rate_hz: float, seconds: float, warm_s: float, seed: int) -> Heard:
        heard = drive(
            self.url,
            [_INBOX],
            [_OUTBOX],
            self.backlog.raw,
            rate_hz=rate_hz,
            seconds=seconds,
            warm_s=warm_s,
            first_id=self.backlog.next_id,
            sessions=len(self.backlog.sessions),
            seed=seed,
        )
        self._quiet(rate_hz * seconds)
        for key in (_INBOX, _OUTBOX):
            self.backlog.connection.call("XTRIM", key, "MAXLEN", 0)
        return heard

    def _quiet(self, frames: float) -> None:
        """Let what is left be answered (each frame went to one stream), then empty `out`."""
        self.backlog.next_id += int(2 * frames) + 10 * len(self.backlog.sessions)
        time.sleep(0.2)
        self.backlog.trim()


def _at(run: Run, live: Live, load: int, rate_hz: float) -> Iterator[Figure]:
    """Figures at one number of sessions and one load."""
    sessions = len(live.backlog.sessions)
    warm_s = run.pick(1.0, 0.3)
    seconds = warm_s + run.pick(float(np.clip(4000 / rate_hz, 4.0, 15.0)), 1.0)
    drives: dict[str, Callable[[float, float, float, int], Heard]] = {
        "worker": live.worker,
        "echo": live.echo,
    }
    heard: dict[str, list[Heard]] = {"worker": [], "echo": []}
    repeats = run.pick(max(3, run.repeats // 2), 2)
    with run.task(f"latency, {sessions_of(sessions)} at {load} %", 2 * repeats) as advance:
        for seed in range(repeats):
            for name, act in drives.items():
                heard[name].append(act(rate_hz, seconds, warm_s, seed))
                advance()
    answered = min(h.answered for h in heard["worker"])
    late = max(float(np.percentile(h.late_ms, 99)) for h in heard["worker"] + heard["echo"])
    note = f"producer late by {late:.1f} ms at p99"
    if answered < 1:
        note = f"not sustained: {100 * (1 - answered):.0f} % unanswered 5 s later"
    elif np.median([np.percentile(h.latency_ms, 50) for h in heard["worker"]]) > 500:
        note = "not sustained: the queue grows"
    at = {
        name: {p: np.asarray([_percentile(h, p) for h in of]) for p in PERCENTILES}
        for name, of in heard.items()
    }
    for p in PERCENTILES:
        mine, echo = at["worker"][p], at["echo"][p]
        if p == 99.9 and rate_hz * (seconds - warm_s) < 2000:
            continue  # fewer than two frames would decide it
        yield larger(
            mine,
            echo,
            key=f"latency.{sessions}.{load}.p{p:g}",
            a=f"push to reply p{p:g}, {sessions_of(sessions)} at {load} % ({rate_hz:,.0f}/s)",
            b="echo",
            of="ms",
            note=note if p == 99.0 else "",
        ).at(f"latency {sessions_of(sessions)}", f"p{p:g}", float(load))
    if sessions == 1:
        step = BareStep(model(), 1)
        step_ms = [1e3 * step.thing() for _ in range(repeats)]
        yield Figure(
            f"latency.{sessions}.{load}.over_echo",
            f"p50 of {sessions_of(sessions)} at {load} % beyond the echo's and a step of 1 row",
            "",
            Spread.of(at["worker"][50.0] - at["echo"][50.0] - step_ms),
            unit="ms",
            better="less",
        )
    if load == 50:
        yield larger(
            at["worker"][99.0],
            at["worker"][50.0],
            key=f"latency.{sessions}.{load}.tail",
            a=f"p99 of {sessions_of(sessions)} at {load} %",
            b="its p50",
            of="ms",
        )


def _percentile(heard: Heard, p: float) -> float:
    """A percentile that may be infinite: one of the values, no mean of two."""
    return float(np.percentile(heard.latency_ms, p, method="higher"))
