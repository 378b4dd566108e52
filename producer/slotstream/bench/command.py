"""`slotstream bench`: the checks before a load, the load, its report."""

from __future__ import annotations

import contextlib
import gc
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import redis
from redis.exceptions import NoPermissionError
from rich.console import Console

from slotstream.bench.display import Display
from slotstream.bench.load import Load
from slotstream.bench.outcome import Outcome
from slotstream.bench.plan import Plan
from slotstream.bench.samples import at_random, from_file
from slotstream.client import Client
from slotstream.errors import Unavailable
from slotstream.operating import workers_of

_PATIENCE_S = 3.0


def bench(url: str, app: str, plan: Plan, *, file: Path | None, json_file: Path | None) -> bool:
    """Run a load and report it; whether every frame had its reply, once.

    Raises:
        Unavailable: nobody serves the app, or its workers have no room.
        BadFrame: the file's frames are not the app's.
        redis.RedisError: Redis cannot be reached at the start.
    """
    # A pipe has no edge to wrap at.
    console = Console(soft_wrap=False)
    if not console.is_terminal:
        console = Console(width=120)
    config = _served(url, app)
    samples = from_file(file, config) if file else at_random(config, plan.seed)
    with Client(url, app, window=plan.window) as client, _presses() as presses:
        load = Load(client, plan, samples, presses=lambda: len(presses))
        console.print(
            f"{plan.sessions:,} sessions of {app} for {plan.duration_s:g} s; Ctrl-C ends it sooner",
            highlight=False,
        )
        gc.collect()
        gc.freeze()  # what is there stays there: the collector need not go through it meanwhile
        started, cut = time.process_time(), None
        try:
            with Display(console, load):
                load.run()
        except (redis.RedisError, OSError) as error:
            if not load.ledger.pushed:
                raise
            cut = str(error)
        finally:
            gc.unfreeze()
        outcome = Outcome(app, load, load.cpu_s or time.process_time() - started, cut)
    outcome.show(console)
    if json_file is not None:
        json_file.write_text(json.dumps(outcome.as_json(), indent=2) + "\n")
        console.print(f"written to {json_file}", highlight=False, soft_wrap=True)
    return outcome.ok


def _served(url: str, app: str) -> dict[str, str]:
    """The configuration of an app that a worker serves."""
    with Client(url, app, patience_s=_PATIENCE_S) as client:
        config = client.config()
        if not config:
            raise Unavailable(
                f"no worker of app {app} has run on this Redis: it has no configuration; start "
                "one (`slotstream worker`), or name another app (--app)"
            )
        # Who may only produce cannot see the workers, and learns by waiting.
        with contextlib.suppress(NoPermissionError):
            if not any(worker.alive for worker in workers_of(client.app)):
                raise Unavailable(
                    f"no worker of app {app} is alive; `slotstream workers --app {app}` shows "
                    "those that were"
                )
    return config


@contextlib.contextmanager
def _presses() -> Iterator[list[int]]:
    """Ctrl-C as something that is asked for: a list that grows by each; the third one ends it."""
    presses: list[int] = []

    def press(number: int, _: FrameType | None) -> None:
        presses.append(number)
        if len(presses) > 2:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield presses  # signals are the main thread's
        return
    before = [signal.signal(number, press) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield presses
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
