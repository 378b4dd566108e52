"""`make bench-gpu`: the engine and the worker on a GPU, in one go, in some minutes.

    python -m benchmarks.gpu --json gpu.json --png gpu.png

Rows a second of whole rounds against the bare step at its best row count, at 256 to 65,536 slots;
then how many real-time sessions, at 10 frames a second each, one worker sustains: every frame
answered, and 99 of 100 within 100 ms of when they were due (before the session's next).

The bound of the first is the bare step: a frame moves 1,600 bytes to the device and 400 back, two
rows of 1,064 bytes are moved on it, and it takes 0.44 million multiplications. The bound of the
second is the worker's own backlog rate (`benchmarks/worker.py`), and beside it what one producer
can push: it is one process, and so is Redis.

Without a GPU it says so and exits with status 2, unless `--allow-cpu` is said (small sizes then,
to see that the script works).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

from benchmarks import bare
from benchmarks.__main__ import FILE, RESULTS, collect, finish, wide_console
from benchmarks.backlog import Backlog
from benchmarks.engine import rounds, served
from benchmarks.load import Heard, drive
from benchmarks.measure import Figure, Run, Spread, clock
from benchmarks.model import frames_of, model
from benchmarks.processes import open_sessions, worker_process
from benchmarks.report import sessions_of
from slotstream.embedded import EmbeddedRedis

SLOTS = (256, 1024, 4096, 16_384, 65_536)
ROW_COUNTS = (1024, 4096, 16_384, 65_536)
RATE_HZ, DEADLINE_MS = 10.0, 100.0
FIRST, MOST = 500, 65_536


def engine_on_device(run: Run) -> Iterator[Figure]:
    """Whole rounds against the bare step, all sessions active."""
    step = bare.best(run, model(), run.pick(ROW_COUNTS, (16, 64)))
    for slots in run.pick(SLOTS, (16, 64)):
        things = {"bare": step.thing, "rounds": clock(rounds(served(slots), slots, slots), slots)}
        times = run.alternate(f"engine, {slots:,} slots", things)
        yield bare.against(
            times,
            "rounds",
            step,
            key=f"gpu.engine.{slots}",
            a=f"round of {slots:,}, all active",
            series="all active",
            sessions=slots,
        )


def real_time(run: Run) -> Iterator[Figure]:
    """The most sessions at 10 frames a second that one worker sustains: doubled, then halved in."""
    low, high, heard = 0, 0, []
    sessions, most = run.pick((FIRST, MOST), (8, 32))
    with EmbeddedRedis() as redis, worker_process(redis.url, "real", slots=most) as process:
        backlog = Backlog(redis.url, "real", [], frames_of(16))
        with run.task("real-time sessions", 12) as advance:
            for _ in range(12):
                held = len(backlog.sessions)
                if held < sessions:
                    new = [f"s{k}" for k in range(held, sessions)]
                    open_sessions(process, redis.url, "real", new)
                    backlog.sessions += new
                one = _drive(redis.url, backlog, sessions, run.pick(6.0, 1.5))
                advance()
                if sustained(one):
                    low, heard = sessions, [*heard, one]
                else:
                    high = sessions
                if low >= most or (high and high - low <= max(1, low // 10)):
                    break
                sessions = (low + high) // 2 if high else min(2 * sessions, most)
        backlog.close()
    p99 = [float(np.percentile(one.latency_ms, 99)) for one in heard] or [float("inf")]
    yield Figure(
        "gpu.real_time",
        f"most sessions at {RATE_HZ:g} frames/s, p99 within {DEADLINE_MS:g} ms",
        "frames a second of a session",
        Spread.of([float(low)]),
        a_value=low * RATE_HZ,
        b_value=RATE_HZ,
        of="Hz",
        note=f"p99 there {p99[-1]:.1f} ms; the next that was tried, {sessions_of(high)}, was not"
        if high
        else f"p99 there {p99[-1]:.1f} ms; no more were tried",
    )


def sustained(heard: Heard) -> bool:
    """Whether every frame was answered, 99 of 100 of them in time."""
    in_time = np.percentile(heard.latency_ms, 99, method="higher") <= DEADLINE_MS
    return bool(heard.answered == 1 and in_time)


def _drive(url: str, backlog: Backlog, sessions: int, seconds: float) -> Heard:
    names, keys = backlog.sessions[:sessions], backlog.keys
    heard = drive(
        url,
        [keys.inbox(s) for s in names],
        [keys.outbox(s) for s in names],
        backlog.raw,
        rate_hz=RATE_HZ * sessions,
        seconds=seconds,
        warm_s=1.0,
        first_id=backlog.next_id,
    )
    backlog.next_id += int(2 * RATE_HZ * sessions * seconds)
    backlog.trim()
    return heard


@click.command()
@click.option("--allow-cpu", is_flag=True, help="Small sizes on a CPU, to see that it works.")
@click.option("--repeats", type=click.IntRange(0), default=0, help="Repetitions; 7 by default.")
@click.option("--json", "json_path", type=FILE, default=RESULTS / "gpu.json", show_default=True)
@click.option("--png", "png_path", type=FILE, default=RESULTS / "gpu.png", show_default=True)
def main(allow_cpu: bool, repeats: int, json_path: Path, png_path: Path) -> None:
    """Measure the engine and the worker on a GPU."""
    import jax

    console = wide_console()
    found = jax.default_backend()
    if found != "gpu" and not allow_cpu:
        console.print(
            f"JAX sees no GPU here (its backend is {found}); nothing was measured. On a machine "
            "with one, install the extra `cuda`; --allow-cpu tries the script with small sizes."
        )
        raise SystemExit(2)
    run = Run(quick=found != "gpu", repeats=repeats)
    report = collect(run, {"engine": engine_on_device, "real time": real_time}, console)
    report.show(console)
    finish(report, json_path, png_path, console)


if __name__ == "__main__":
    main()
