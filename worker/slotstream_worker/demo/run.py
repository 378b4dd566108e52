"""`slotstream demo`: 370 recordings, one worker, one crash, and every reply checked."""

from __future__ import annotations

import secrets
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from slotstream import Client, Reply
from slotstream.embedded import EmbeddedRedis
from slotstream_worker.demo.outcome import Outcome, show
from slotstream_worker.demo.process import WorkerProcess
from slotstream_worker.demo.vowels import Utterance, load

APP = "demo"
_IN_TRANSIT_S = 0.5


@dataclass
class Watch:
    """What the producer sees while it runs: when replies came, and when the worker was killed."""

    total: int
    started: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    replies_of: dict[str, int] = field(default_factory=dict)
    killed_at: float | None = None
    back_at: float | None = None
    at_kill: dict[str, int] = field(default_factory=dict)

    def reply(self, session: str, latency_s: float | None) -> None:
        """Note one reply."""
        now = time.perf_counter() - self.started
        self.times.append(now)
        self.latencies.append(latency_s or 0.0)
        self.replies_of[session] = self.replies_of.get(session, 0) + 1

    def back(self) -> bool:
        """Whether the reply just noted is the first that the new worker sent."""
        # Replies published before the kill may still arrive just after it.
        if (
            self.killed_at is None
            or self.back_at is not None
            or self.times[-1] - self.killed_at < _IN_TRANSIT_S
        ):
            return False
        self.back_at = self.times[-1]
        return True

    @property
    def outage_s(self) -> float | None:
        """Seconds from the kill to the first reply of the new worker."""
        if self.killed_at is None or self.back_at is None:
            return None
        return self.back_at - self.killed_at

    def calm_ms(self) -> list[float]:
        """Latencies of the frames that were not on their way while the worker was down."""
        killed, back = self.killed_at, self.back_at
        return [
            1e3 * latency
            for at, latency in zip(self.times, self.latencies, strict=True)
            if killed is None or back is None or at < killed or at - latency > back
        ]

    def killed(self) -> None:
        """Note that the worker has just been killed."""
        self.killed_at = time.perf_counter() - self.started
        self.at_kill = dict(self.replies_of)


def run_demo(png: Path, *, rate_hz: float, crash: bool, server: str | None) -> int:
    """Run the demo; returns the exit status: 0 when nothing was lost, twice, or different.

    Args:
        png: where the picture goes.
        rate_hz: frames a second of each session.
        crash: kill the worker when half of the replies have come.
        server: the redis-server to run; one is found by default.
    """
    console = Console()
    utterances = _utterances()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slotstream-demo-")))
        redis = stack.enter_context(EmbeddedRedis(server=server, append_only=True))
        worker = WorkerProcess(redis.url, APP, len(utterances), folder)
        stack.callback(worker.stop)
        _say(console, f"Redis {_version(redis)} on a free port, in a temporary folder")
        with console.status("starting a worker: loading, measuring launches, compiling"):
            worker.start()
            worker.wait_ready()
        _say(
            console,
            f"a worker serves the network; {len(utterances)} recordings of speech "
            f"stream at {rate_hz:g} frames a second each",
        )
        with Client(redis.url, APP) as client:
            run = _stream(console, client, utterances, rate_hz, worker if crash else None)
        _say(console, f"the worker was asked to drain, and left with status {worker.stop()}")
    return _finish(console, png, utterances, run)


def run_against(url: str, app: str, png: Path, *, rate_hz: float) -> int:
    """Stream the recordings to workers that run already; returns the exit status."""
    console = Console()
    utterances = _utterances()
    # Ids of this run's own: others may stream the same recordings.
    nonce = secrets.token_hex(3)
    utterances = {f"{nonce}-{name}": one for name, one in utterances.items()}
    _say(
        console,
        f"{len(utterances)} recordings of speech stream to app {app} at {rate_hz:g} "
        "frames a second each",
    )
    with Client(url, app) as client:
        run = _stream(console, client, utterances, rate_hz, None)
    return _finish(console, png, utterances, run)


@dataclass
class _Run:
    """What was streamed: the replies, and what was seen meanwhile."""

    replies: dict[str, list[Reply]]
    watch: Watch
    elapsed_s: float


def _utterances() -> dict[str, Utterance]:
    return {f"utterance-{k:03}": one for k, one in enumerate(load("test"))}


def _stream(
    console: Console,
    client: Client,
    utterances: dict[str, Utterance],
    rate_hz: float,
    victim: WorkerProcess | None,
) -> _Run:
    """Stream all recordings as concurrent sessions; kill and restart `victim` half-way."""
    watch = Watch(sum(len(one.steps) for one in utterances.values()))
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as bar:
        task = bar.add_task("replies", total=watch.total)

        def seen(session: str, reply: Reply) -> None:
            watch.reply(session, reply.latency_s)
            bar.update(task, completed=len(watch.times))
            if victim and watch.killed_at is None and len(watch.times) >= watch.total // 2:
                pid = victim.kill()
                watch.killed()
                victim.start()
                _say(
                    bar.console,
                    f"  [bold red]worker {pid} killed with SIGKILL[/] after "
                    f"{len(watch.times)} replies, and started again",
                )
            elif watch.back():
                _say(bar.console, f"  the sessions went on {watch.outage_s:.1f} s after the kill")

        # [steps, 12] as frames [1, 12]
        streams = {name: one.steps[:, None] for name, one in utterances.items()}
        replies = client.run(streams, rate_hz=rate_hz, on_reply=seen)
    return _Run(replies, watch, time.perf_counter() - watch.started)


def _finish(console: Console, png: Path, utterances: dict[str, Utterance], run: _Run) -> int:
    """Compare, print and draw; returns the exit status."""
    from slotstream_worker.demo.picture import draw

    watch = run.watch
    outcome = Outcome.of(utterances, run.replies, watch.at_kill, run.elapsed_s)
    show(console, outcome, watch.calm_ms(), watch.outage_s)
    draw(png, outcome, watch.times, watch.killed_at, watch.back_at)
    _say(console, f"picture: {png}")
    return 0 if outcome.right else 1


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _version(redis: EmbeddedRedis) -> str:
    with Client(redis.url, APP) as client:
        return str(client.redis.info("server")["redis_version"])
