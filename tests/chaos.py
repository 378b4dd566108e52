"""Chaos: workers killed, paused, drained and added, Redis restarted, connections cut, under load.

    make chaos                                       about ten minutes
    python tests/chaos.py --seed 7 --faults 200      one seed, again and alone
    python tests/chaos.py --cluster                  on three nodes, one of them failed over

Every reply is compared, bit for bit, with an undisturbed computation of its stream.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster import Cluster
from slotstream import Client, Reply
from slotstream.embedded import EmbeddedRedis

TESTS = Path(__file__).parent
APP = "chaos"
ROW_COUNT = 16
LEASE_S = 2.0


@dataclass
class Seen:
    """What the producer saw: each session's reply times, and what each kill interrupted."""

    times: dict[str, list[float]] = field(default_factory=dict)
    kills: list[tuple[float, list[str]]] = field(default_factory=list)

    def takeovers(self) -> list[float]:
        """Seconds from each kill to the next reply of each session its worker held."""
        waits = []
        for at, sessions in self.kills:
            for session in sessions:
                after = [t for t in self.times.get(session, ()) if t > at]
                if after:
                    waits.append(after[0] - at)
        return waits

    def longest_gap(self) -> float:
        return max(
            (b - a for t in self.times.values() for a, b in pairwise(t)),
            default=0.0,
        )


class Workers:
    """Worker processes, ended by their pids only."""

    def __init__(
        self,
        url: str,
        folder: Path,
        sessions: int,
        partitions: int,
        options: tuple[str, ...] = (),
    ) -> None:
        self.url, self.folder, self.sessions = url, folder, sessions
        self.partitions, self.options = partitions, options
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.logs: dict[int, Path] = {}

    def start(self) -> int:
        """Start one; returns its pid."""
        command = [
            *(sys.executable, "-m", "slotstream.cli", "worker", "--redis", self.url),
            *("--app", APP, "--model", "serving_models:served", "--row-counts", str(ROW_COUNT)),
            *("--slots", "64", "--max-sessions", str(self.sessions), "--lease", str(LEASE_S)),
            *("--partition-count", str(self.partitions)),
            *("--sweep", "1", "--checkpoint-interval", "0.5", "--rebalance"),
            *("--compile-cache", str(self.folder / "compiled"), "--max-attempts", "8"),
            *self.options,
        ]
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        log = self.folder / f"worker-{len(self.logs)}.log"
        with log.open("w") as out:
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        self.running[process.pid], self.logs[process.pid] = process, log
        return process.pid

    def ready(self) -> int:
        """Running workers that have begun to serve."""
        return sum("serving, in launches" in self.logs[pid].read_text() for pid in self.running)

    def kill(self, pid: int, number: int) -> int:
        """Signal one of them; after an ending signal, wait until it has gone."""
        process = self.running[pid]
        process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            del self.running[pid]
        return process.returncode or 0

    def stop(self) -> None:
        for pid in list(self.running):
            self.running[pid].send_signal(signal.SIGCONT)
            self.kill(pid, signal.SIGKILL)


@dataclass
class Outcome:
    """The table's figures."""

    seed: int
    faults: Counter[str]
    frames: int
    replies: int
    lost: int
    duplicated: int
    out_of_order: int
    errors: int
    different: int
    takeovers: list[float]
    longest_gap_s: float
    seconds: float

    @property
    def right(self) -> bool:
        return not (
            self.lost or self.duplicated or self.out_of_order or self.errors or self.different
        )


class Chaos:
    """One run of one seed."""

    def __init__(
        self,
        seed: int,
        *,
        sessions: int,
        rate_hz: float,
        workers: int = 3,
        cluster: bool = False,
    ) -> None:
        self.seed, self.sessions, self.rate_hz, self.target = seed, sessions, rate_hz, workers
        # On a cluster each primary has a replica that keeps up, or it refuses writes.
        self.cluster = (
            Cluster(replicas=True, options={"min-replicas-to-write": 1}) if cluster else None
        )
        self.rng = random.Random(seed)
        self.seen = Seen()
        self.faults: Counter[str] = Counter()
        self.pushed: dict[str, list[np.ndarray[Any, Any]]] = {}
        self.enough = threading.Event()
        self.options: tuple[str, ...] = ()
        self.results: dict[str, list[Reply]] = {}

    def run(self, faults: int, limit_s: float, say: Callable[[str, int], None]) -> Outcome:
        """Inject `faults` faults, or as many as fit into `limit_s`; then check everything."""
        started = time.monotonic()
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
            if self.cluster:
                self.url = stack.enter_context(self.cluster).url
            else:
                self.redis = stack.enter_context(EmbeddedRedis(append_only=True))
                self.url = self.redis.url
            self.folder = folder
            partitions = 16 if self.cluster else 1
            self.workers = Workers(self.url, folder, self.sessions, partitions, self.options)
            stack.callback(self.workers.stop)
            for _ in range(self.target):
                self.workers.start()
                self._until(lambda: self.workers.ready() >= len(self.workers.running), 120)
            results: dict[str, list[Reply]] = {}
            producer = threading.Thread(target=self._produce, args=(results,), daemon=True)
            producer.start()
            self._until(lambda: len(self.seen.times) == self.sessions, 60)
            for number in range(faults):
                if time.monotonic() - started > limit_s:
                    break
                if self.cluster and number == faults // 2:
                    self._fail_over()
                    self.faults["a primary failed over"] += 1
                kind = self._fault()
                self.faults[kind] += 1
                say(kind, number + 1)
                time.sleep(self.rng.uniform(0.2, 1.5))
            self._resume()
            self._settle()
            self.enough.set()
            producer.join(120)
            if producer.is_alive():
                logs = "\n".join(log.read_text()[-800:] for log in folder.glob("*.log"))
                raise AssertionError(f"seed {self.seed}: the streams did not end\n{logs}")
        self.results = results
        return self._check(results, time.monotonic() - started)

    # Load

    def _produce(self, results: dict[str, list[Reply]]) -> None:
        def seen(session: str, reply: Reply) -> None:
            self.seen.times.setdefault(session, []).append(time.monotonic())

        names = [f"robot-{k:03}" for k in range(self.sessions)]
        with Client(self.url, APP, window=32, patience_s=60) as client:
            results.update(
                client.run(
                    {name: self._frames(k, name) for k, name in enumerate(names)},
                    rate_hz=self.rate_hz,
                    timeout_s=90,
                    on_reply=seen,
                )
            )

    def _frames(self, k: int, name: str) -> Iterator[np.ndarray[Any, Any]]:
        """A stream of its own, from the seed: noise over a slow wave, until there is enough."""
        rng, sent = np.random.default_rng((self.seed, k)), self.pushed.setdefault(name, [])
        while not self.enough.is_set():
            wave = np.sin(len(sent) / 5 + k)
            sent.append((rng.normal(size=(4, 6)) + wave).astype(np.float32))
            yield sent[-1]

    # Faults

    def _fault(self) -> str:
        kinds: dict[str, Callable[[], None]] = {
            "SIGKILL": self._sigkill, "SIGSTOP past the lease": self._sigstop,
            "SIGTERM and restart": self._sigterm, "Redis restarted": self._restart_redis,
            "connections killed": self._cut, "a worker joins": self._join,
        }  # fmt: skip
        weights = [
            6,
            3,
            4,
            0 if self.cluster else 2,
            4,
            1 if len(self.workers.running) <= self.target else 0,
        ]
        kind = self.rng.choices(list(kinds), weights)[0]
        # Somebody must be left to take over: wait for who is starting.
        with contextlib.suppress(AssertionError):
            self._until(lambda: self.workers.ready() >= 2, 30)
        kinds[kind]()
        return kind

    def _pick(self) -> int:
        serving = [
            p
            for p in sorted(self.workers.running)
            if "serving, in launches" in self.workers.logs[p].read_text()
        ]
        return self.rng.choice(serving)

    def _owned_by(self, pid: int) -> list[str]:
        """Sessions that the process owns, by its lease's value."""
        with Client(self.url, APP, patience_s=20) as client:
            found = []
            for keys in client.app.partitions():
                for raw in client.link.call("SMEMBERS", keys.workers):
                    lease = client.link.call("GET", keys.lease(raw.decode()))
                    if lease and lease.split()[-1] == str(pid).encode():
                        owned = client.link.call("SMEMBERS", keys.owned(raw.decode()))
                        found += [name.decode() for name in owned]
        return found

    def _sigkill(self) -> None:
        pid = self._pick()
        held = self._owned_by(pid)
        self.seen.kills.append((time.monotonic(), held))
        self.workers.kill(pid, signal.SIGKILL)
        self.workers.start()

    def _sigstop(self) -> None:
        pid = self._pick()
        self.workers.kill(pid, signal.SIGSTOP)
        time.sleep(LEASE_S + self.rng.uniform(0.5, 2.0))
        self.workers.kill(pid, signal.SIGCONT)

    def _sigterm(self) -> None:
        pid = self._pick()
        status = self.workers.kill(pid, signal.SIGTERM)
        if status not in (0, -signal.SIGTERM):
            log = self.workers.logs[pid].read_text()[-1500:]
            raise AssertionError(f"seed {self.seed}: a drained worker left with {status}:\n{log}")
        self.workers.start()

    def _restart_redis(self) -> None:
        self.redis.kill()
        time.sleep(self.rng.uniform(0, 0.5))
        self.redis.start()

    def _cut(self) -> None:
        kinds = self.rng.sample(["normal", "pubsub"], self.rng.randint(1, 2))
        for kind in kinds:
            command = ("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
            if self.cluster:
                for server in self.cluster.primaries:
                    server.call(*command)
            else:
                with Client(self.url, APP, patience_s=20) as client:
                    client.link.call(*command, key="")

    def _fail_over(self) -> None:
        """Kill a primary whose replica has all that was acknowledged; it comes back as replica."""
        assert self.cluster
        victim = self.rng.choice(self.cluster.primaries)
        self.cluster.fail_over(victim, settled=True)
        victim.start()

    def _join(self) -> None:
        self.workers.start()

    def _resume(self) -> None:
        for process in self.workers.running.values():
            process.send_signal(signal.SIGCONT)
        if not self.workers.running:
            self.workers.start()

    def _settle(self) -> None:
        """What is to have happened before the streams end."""

    # The check

    def _check(self, results: dict[str, list[Reply]], seconds: float) -> Outcome:
        expected = undisturbed(self.pushed)
        lost = duplicated = disorder = errors = different = 0
        for name, frames in self.pushed.items():
            got = results.get(name, [])
            ids = [reply.id for reply in got]
            lost += max(len(frames) - len(set(ids)), 0)
            duplicated += len(ids) - len(set(ids)) + max(len(set(ids)) - len(frames), 0)
            disorder += sum(a >= b for a, b in pairwise(ids))
            errors += sum(reply.error is not None for reply in got)
            wrong = [
                k
                for k, (reply, _) in enumerate(zip(got, frames, strict=False))
                if not isinstance(reply.output, dict)
                or not all(
                    np.array_equal(reply.output[key], whole[k])
                    for key, whole in expected[name].items()
                )
            ]
            if wrong or len(got) != len(frames):
                different += 1
                print(f"{name}: {len(got)} replies to {len(frames)} frames, wrong {wrong[:8]}")
        return Outcome(
            *(self.seed, self.faults, sum(map(len, self.pushed.values()))),
            *(sum(map(len, results.values())), lost, duplicated, disorder, errors, different),
            *(self.seen.takeovers(), self.seen.longest_gap(), seconds),
        )

    @staticmethod
    def _until(what: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            if time.monotonic() > deadline:
                raise AssertionError("the workers did not start, or the sessions did not")
            time.sleep(0.02)


def undisturbed(
    streams: dict[str, list[np.ndarray[Any, Any]]],
) -> dict[str, dict[str, list[np.ndarray[Any, Any]]]]:
    """Every stream's outputs by a calm engine with the same row count, frame by frame."""
    from serving_models import served
    from slotstream_worker.engine.engine import Engine

    engine = Engine(served(), len(streams))
    engine.prepare((ROW_COUNT,))
    engine.pool.admit(streams)
    outputs: dict[str, dict[str, list[np.ndarray[Any, Any]]]] = {name: {} for name in streams}
    for k in range(max(map(len, streams.values()))):
        names = [name for name, frames in streams.items() if k < len(frames)]
        for ran in engine.run(names, np.stack([streams[name][k] for name in names])):
            for key, array in ran.outputs.items():
                for row, name in zip(array, ran.sessions, strict=True):
                    outputs[str(name)].setdefault(key, []).append(row)
    return outputs


def show(console: Console, outcomes: list[Outcome]) -> None:
    """Print the runs as a table, a column each."""
    table = Table(title="chaos", title_justify="left")
    table.add_column("seed")
    for outcome in outcomes:
        table.add_column(str(outcome.seed), justify="right")
    rows: list[tuple[str, Callable[[Outcome], str]]] = [
        (f"faults: {kind}", lambda o, kind=kind: str(o.faults[kind]))  # type: ignore[misc]
        for kind in sorted({kind for o in outcomes for kind in o.faults})
    ]
    rows += [
        ("faults in all", lambda o: str(o.faults.total())),
        ("frames pushed", lambda o: f"{o.frames:,}"), ("replies", lambda o: f"{o.replies:,}"),
        ("lost", lambda o: str(o.lost)), ("duplicated", lambda o: str(o.duplicated)),
        ("out of order", lambda o: str(o.out_of_order)), ("errors", lambda o: str(o.errors)),
        ("sessions that differ", lambda o: str(o.different)),
        ("takeover after SIGKILL, p50", lambda o: _quantile(o.takeovers, 50)),
        ("takeover after SIGKILL, p99", lambda o: _quantile(o.takeovers, 99)),
        ("longest gap of a session", lambda o: f"{o.longest_gap_s:.1f} s"),
        ("seconds", lambda o: f"{o.seconds:.0f}"),
    ]  # fmt: skip
    for name, value in rows:
        table.add_row(name, *(value(outcome) for outcome in outcomes))
    console.print(table)


def _quantile(values: list[float], q: int) -> str:
    return f"{np.percentile(values, q):.1f} s" if values else "-"


@click.command()
@click.option("--seed", type=int, multiple=True, help="Run these seeds only.")
@click.option("--faults", default=200, show_default=True, help="Faults a seed.")
@click.option("--sessions", default=200, show_default=True)
@click.option("--rate", "rate_hz", default=1.5, show_default=True, help="Frames a second each.")
@click.option("--cluster", is_flag=True, help="On a cluster of three primaries and replicas.")
@click.option("--minutes", default=9.5, show_default=True, help="No more faults after these.")
def main(
    seed: tuple[int, ...],
    faults: int,
    sessions: int,
    rate_hz: float,
    cluster: bool,
    minutes: float,
) -> None:
    """Run chaos, print a table, and exit with 0 when nothing was lost, twice, or different."""
    console, outcomes = Console(), []
    with Progress(
        TextColumn("seed {task.fields[seed]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
    ) as bar:
        for one in seed or (1,):
            task = bar.add_task("starting workers", total=faults, seed=one)

            def say(kind: str, number: int, task: Any = task) -> None:
                bar.update(task, completed=number, description=kind)

            outcomes.append(
                Chaos(one, sessions=sessions, rate_hz=rate_hz, cluster=cluster).run(
                    faults, 60 * minutes / len(seed or (1,)), say
                )
            )
    show(console, outcomes)
    sys.exit(0 if all(outcome.right for outcome in outcomes) else 1)


if __name__ == "__main__":
    main()
