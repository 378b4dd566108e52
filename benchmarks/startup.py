"""Start-up: from starting the worker's process to the first reply, cold and with a compile cache.

The bound is a process that imports JAX, builds the model, and compiles and runs one step of one
row. The worker does beside it: measure and compile a ladder of row counts, twice each (from rest
and going on), compare their bits, compile the pool's bookkeeping, and claim the session. With
`--compile-cache` the compiled programs are read instead of made; measuring and comparing stay.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from benchmarks.measure import Figure, Run, faster
from benchmarks.model import frames_of
from benchmarks.processes import ROOT, worker_process
from slotstream import Client
from slotstream.embedded import EmbeddedRedis

SLOTS = 1024
_BARE = """
import jax
from benchmarks.bare import BareStep
from benchmarks.model import model
BareStep(model(), 1).run()
"""


def startup(run: Run) -> Iterator[Figure]:
    """Seconds to the first reply, cold, cached, and of a bare process."""
    slots = run.pick(SLOTS, 16)
    with tempfile.TemporaryDirectory(prefix="slotstream-compiled-") as cache:
        things = {
            "cold": lambda: _first_reply(slots),
            "cached": lambda: _first_reply(slots, "--compile-cache", cache),
            "bare": _bare,
        }
        times = run.alternate("start-up", things, repeats=run.pick(min(run.repeats, 5), 1))
    names = {
        "cold": f"first reply of a worker of {slots:,} slots, cold",
        "cached": f"first reply of a worker of {slots:,} slots, cached",
        "bare": "a process that runs one bare step",
    }
    for a, b in (("cached", "cold"), ("cold", "bare"), ("cached", "bare")):
        figure = faster(times, a, b, key=f"startup.{a}.{b}", a=names[a], b=names[b])
        yield figure.in_seconds().at("startup", "", 0.0)


def _first_reply(slots: int, *options: str) -> float:
    """Seconds from the start of a worker's process to the reply to a frame that waits for it."""
    with EmbeddedRedis() as redis, Client(redis.url, "start") as client:
        session = client.open("first")
        session.push(frames_of(1)[0])
        start = time.perf_counter()
        with worker_process(redis.url, "start", *options, slots=slots) as process:
            process.wait_until(
                lambda: client.link.call("XLEN", session.outbox) >= 2, "the first reply"
            )
            return time.perf_counter() - start


def _bare() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", _BARE], cwd=ROOT, check=True)
    return time.perf_counter() - start
