"""The demo's worker: a process of its own, killed and started again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from slotstream.errors import Unavailable


class WorkerProcess:
    """`slotstream worker` on the demo's model. `start`, `kill`, `stop`; ended by its own pid."""

    def __init__(self, url: str, app: str, slots: int, folder: Path) -> None:
        self.log = folder / "worker.log"
        self._command = [
            sys.executable,
            "-m",
            "slotstream.cli",
            "worker",
            "--redis",
            url,
            "--app",
            app,
            "--model",
            "slotstream_worker.demo.serving:model",
            "--slots",
            str(slots),
            "--name",
            "demo",
            "--checkpoint-interval",
            "1",
            "--compile-cache",
            str(folder / "compiled"),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def start(self) -> None:
        """Start the process; returns at once."""
        self._starts += 1
        # Settings of the caller's own workers are not the demo's.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLOTSTREAM_")}
        with self.log.open("a") as out:
            self._process = subprocess.Popen(  # noqa: S603 (our own command)
                self._command,
                stdout=out,
                stderr=out,
                env=environment,
            )

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Wait until it serves; raises `Unavailable` with its log where it does not."""
        deadline = time.monotonic() + timeout_s
        while self.log.read_text().count("serving, in launches") < self._starts:
            if (
                self._process is None
                or self._process.poll() is not None
                or time.monotonic() > deadline
            ):
                raise Unavailable("the worker did not start:\n" + self.log.read_text()[-3000:])
            time.sleep(0.05)

    def kill(self) -> int:
        """SIGKILL: no chance to say or save anything. Returns the pid it had."""
        if self._process is None:
            raise RuntimeError("the worker has not been started")
        self._process.kill()
        self._process.wait()
        return self._process.pid

    def stop(self) -> int:
        """SIGTERM: drain. Returns the exit status."""
        if self._process is None or self._process.poll() is not None:
            return 0
        self._process.terminate()
        try:
            return self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
