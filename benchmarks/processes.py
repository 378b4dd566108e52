"""Processes that are measured from outside: a worker, an echo. Each ended by its own pid."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from slotstream import Client
from slotstream.names import Keys

ROOT = Path(__file__).parent.parent
MODEL = "benchmarks.model:model"


class Process:
    """`python -m module arguments`, from the project's root. A context manager."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `stop`)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        if self._process is None:
            raise RuntimeError("the process has not been started")
        return self._process.pid

    @property
    def text(self) -> str:
        """The end of what it has printed."""
        self._output.seek(0)
        return self._output.read()[-3000:].decode(errors="replace")

    def start(self) -> Process:
        """Start it; returns at once. Settings of the caller's own workers are not passed on."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLOTSTREAM_")}
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
        )
        return self

    def wait_until(self, done: Callable[[], bool], what: str, timeout_s: float = 300.0) -> None:
        """Poll until `done`; raises with what it printed where it ends first, or takes too long."""
        deadline = time.monotonic() + timeout_s
        while not done():
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"{self._command[2]} ended before {what}:\n{self.text}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not in {timeout_s:g} s: {what}\n{self.text}")
            time.sleep(0.002)

    def stop(self) -> None:
        """End it at once: what it leaves in Redis goes with Redis."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def __enter__(self) -> Process:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def worker_process(url: str, app: str, *options: str, slots: int, model: str = MODEL) -> Process:
    """`slotstream worker` of its own."""
    return Process(
        *("slotstream.cli", "worker", "--redis", url, "--app", app, "--model", model),
        *("--slots", str(slots), "--log-level", "warning", *options),
    )


def open_sessions(process: Process, url: str, app: str, names: Sequence[str]) -> None:
    """Open sessions on a worker's process, and wait until it has taken all of them."""
    with Client(url, app, patience_s=60.0) as client:
        client.open_many(list(names), new=True)
        outbox, keys = Keys(app).outbox, [*names]

        def taken() -> bool:
            while keys and client.link.call("EXISTS", outbox(keys[-1])):
                keys.pop()
            return not keys

        process.wait_until(taken, f"{len(names)} sessions were taken")


def cpu_s(pid: int) -> float:
    """Processor seconds a process has used, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """Bytes of a process in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def why_no_proc() -> str:
    """Why processes cannot be looked into here; empty where they can."""
    return "" if Path("/proc/self/statm").exists() else "needs Linux's /proc"
