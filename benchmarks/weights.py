"""New weights: what a swap costs the rounds, and how fast a version comes, against a plain read.

`stall`: a worker with a backlog serves a model of 100 MB; versions of it are made current again and
again, each of which is staged, verified and applied. The bound: a launch takes the variables as an
argument, so a swap costs a checkpoint of each session and nothing else. Counted are gaps between
the ends of two rounds: by how much the longest while sessions change, and the longest while a
version comes in (which shares the cores with the rounds), is longer than the usual one before.

`transfer`: the bytes of one version into the engine's layout, compared with their digests, against
a plain read of the same bytes through the same transport (`GET` by the client library, `readinto`,
`recv_into`), which keeps nothing. Once without the digests, which is what the target is for, and
once with them: SHA-256 of each byte, on two threads, is then the bound (about 500 MB a second and
core without the processor's own instructions for it).
"""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import Figure, Run, Spread, Thing, Times
from slotstream import Client
from slotstream.embedded import EmbeddedRedis
from slotstream.endpoint import Endpoint
from slotstream_worker import StreamModel, models
from slotstream_worker.config import WorkerConfig
from slotstream_worker.weights import publish
from slotstream_worker.weights.catalogue import Catalogue
from slotstream_worker.weights.holdings import Held, Holdings
from slotstream_worker.weights.layout import Layout
from slotstream_worker.weights.manifest import Manifest
from slotstream_worker.weights.plan import build
from slotstream_worker.weights.staging import Staging
from slotstream_worker.weights.transports import Chunks, Paths, Peers
from slotstream_worker.weights.transports.paths import PIECE_BYTES
from slotstream_worker.weights.transports.peers import Peer, PeerServer
from slotstream_worker.worker import Worker

WIDTH = 2560
"""Four square matrices of so many float32 a side: 105 MB."""
SMALL = 512
SESSIONS = 16
FEATURES = 8


def of_width(width: int) -> StreamModel:
    """A recurrent model of four square matrices, with a row of `width` float32 a session."""
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {
        f"layer_{k}": (rng.normal(size=(width, width)) / np.sqrt(width)).astype(np.float32)
        for k in range(4)
    }
    weights["into"] = rng.normal(size=(FEATURES, width)).astype(np.float32)

    def step(weights: Any, carry: Any, frames: jax.Array) -> Any:
        def one(h: Any, x: jax.Array) -> Any:
            h = jnp.tanh(h @ weights["layer_0"] + x @ weights["into"])
            for k in range(1, 4):
                h = jnp.tanh(h @ weights[f"layer_{k}"])
            return h, h[:, :FEATURES]

        return jax.lax.scan(one, carry, frames)

    return models.carry(step, lambda batch: jnp.zeros((batch, width), jnp.float32), weights,
                        frame=1, sample_shape=(FEATURES,), name="square")  # fmt: skip


class Served:
    """A worker in this thread, whose rounds' ends are noted."""

    def __init__(self, url: str, served: StreamModel) -> None:
        self.worker = Worker(
            WorkerConfig(redis=url, slots=SESSIONS, row_counts=(8,), read_ahead=32), served
        )
        self.worker.prepare()
        self.ends: list[float] = []
        collect = self.worker.host.collect

        def noted(flying: Any) -> int:
            frames = collect(flying)
            if frames:
                self.ends.append(time.perf_counter())
            return frames

        self.worker.host.collect = noted  # type: ignore[method-assign]  # the instrument

    def run(self, until: Callable[[], bool]) -> tuple[float, float]:
        """Turn until something holds; returns when that began and ended."""
        start = time.perf_counter()
        while not until():
            self.worker.turn()
        return start, time.perf_counter()

    def longest(self, start: float, end: float) -> float:
        """Seconds of the longest gap between the ends of two rounds that touches a time."""
        ends = np.asarray(self.ends)
        gaps = np.diff(ends)
        touching = (ends[1:] >= start) & (ends[:-1] <= end)
        return float(gaps[touching].max(initial=0.0))

    def median(self, start: float, end: float) -> float:
        """Seconds of the usual gap."""
        ends = np.asarray([t for t in self.ends if start <= t <= end])
        return float(np.median(np.diff(ends)))


def stall(run: Run) -> Iterator[Figure]:
    """The longest gap between two rounds while sessions change, against that without a swap."""
    width = run.pick(WIDTH, SMALL)
    served = of_width(width)
    with EmbeddedRedis() as redis, Client(redis.url) as client:
        catalogue = Catalogue(client.link, "slotstream")
        for k in (1, 2):
            tree = jax.tree.map(lambda w, k=k: np.asarray(w) * np.float32(1 - 0.01 * k),
                                served.variables)  # fmt: skip
            publish(client, tree, version=f"v{k}", keep=0)
        catalogue.point("")
        hosted = Served(redis.url, served)
        feed = _Feed(redis.url)
        residents = hosted.worker.host.residents
        hosted.run(lambda: len(hosted.ends) > 40)
        usual, while_staged, while_changed, calm = [], [], [], []
        with run.task("swaps", run.repeats) as advance:
            for k in range(run.repeats):
                began = time.perf_counter()
                quiet = hosted.run(lambda t=began: time.perf_counter() > t + run.pick(4.0, 1.0))
                calm.append(hosted.longest(*quiet))
                usual.append(hosted.median(*quiet))
                version = f"v{1 + k % 2}"
                catalogue.point(version)
                coming = hosted.run(lambda v=version: residents.current == v)
                changing = hosted.run(lambda v=version: set(residents.sessions()) == {v})
                after = len(hosted.ends) + 3
                hosted.run(lambda n=after: len(hosted.ends) > n)
                while_staged.append(hosted.longest(*coming))
                while_changed.append(hosted.longest(*changing))
                advance()
        feed.stop()
        hosted.worker.drain()
        hosted.worker.close()
    one = np.asarray(usual)
    megabytes = sum(leaf.nbytes for leaf in jax.tree.leaves(served.variables)) / 1e6
    for name, key, gaps in (
        ("while sessions change", "changing", while_changed),
        ("while a version comes in", "coming", while_staged),
    ):
        extra = np.maximum(np.asarray(gaps) / one - 1.0, 0.0)
        yield Figure(
            f"weights.stall.{key}",
            f"longest extra gap between two rounds {name}, a model of {megabytes:.0f} MB",
            "one round",
            Spread.of(extra),
            better="less",
            a_value=1e3 * float(np.median(gaps)),
            b_value=1e3 * float(np.median(one)),
            of="ms",
            note=f"longest gap without a swap: {1e3 * float(np.median(calm)):.1f} ms",
        )


class _Feed:
    """Keeps frames waiting for every session, from a thread."""

    def __init__(self, url: str) -> None:
        self._url, self._over = url, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rng = np.random.default_rng(1)
        frames = rng.normal(size=(64, 1, FEATURES)).astype(np.float32)

        def stream() -> Iterator[Any]:
            k = 0
            while not self._over.is_set():
                yield frames[k % 64]
                k += 1

        with Client(self._url, window=48) as client:
            client.run({f"s{k}": stream() for k in range(SESSIONS)}, timeout_s=120)

    def stop(self) -> None:
        self._over.set()


def transfer(run: Run) -> Iterator[Figure]:
    """Bytes a second into the engine's layout, digests compared, against a plain read."""
    served = of_width(run.pick(WIDTH, SMALL))
    layout = Layout.of(served.variables)
    tree = jax.tree.map(np.asarray, served.variables)
    with (
        EmbeddedRedis() as redis,
        Client(redis.url) as client,
        tempfile.TemporaryDirectory() as folder,
    ):
        chunks = publish(client, tree, version="chunks")
        files = publish(client, tree, version="files", folder=Path(folder))
        assert chunks
        assert files
        holdings = Holdings()
        names = {tensor.name: tensor.name for tensor in chunks.tensors}
        holdings.add("chunks", Held.of(chunks, names, served.variables))
        server = PeerServer("127.0.0.1", 0, "t", holdings.provide)
        server.start()
        peer = Peer("w", "127.0.0.1", server.port, "t")
        endpoint = Endpoint(redis.url)
        ways: dict[str, tuple[Manifest, Callable[[], Any], Callable[[], None]]] = {
            "redis": (chunks, lambda: Chunks(endpoint, "slotstream"), _plain_redis(client)),
            "file": (files, Paths, _plain_file(Path(folder))),
            "peer": (chunks, lambda: Peers("chunks", lambda: [peer]), _plain_socket(layout.nbytes)),
        }
        for kind, (manifest, transport, plain) in ways.items():
            things: dict[str, Thing] = {
                "staged": _staged(manifest, layout, transport),
                "moved": _moved(manifest, layout, transport),
                "plain": _timed(plain),
            }
            times = run.alternate(f"transfer, {kind}", things)
            yield _rate(times, "moved", kind, layout.nbytes, "the transfer")
            yield _rate(times, "staged", kind, layout.nbytes, "the transfer, every digest compared")
        server.stop()


def _rate(times: Times, of: str, kind: str, nbytes: int, what: str) -> Figure:
    return Figure(
        f"weights.transfer.{kind}.{of}",
        f"{what}, {kind}, {nbytes / 1e6:.0f} MB",
        "a plain read of the same bytes",
        Spread.of(times["plain"] / times[of]),
        a_value=1e3 * float(np.median(times[of])),
        b_value=1e3 * float(np.median(times["plain"])),
        of="ms",
    )


def _moved(manifest: Manifest, layout: Layout, transport: Callable[[], Any]) -> Thing:
    """The bytes into the engine's layout; no digest is looked at."""
    plan = build(manifest, layout)

    def measure() -> float:
        staging, way = Staging(manifest, plan, layout), transport()
        start = time.perf_counter()
        for step in plan.steps:
            staging._fetch(step, staging._memory(step), [way], lambda: None)
        passed = time.perf_counter() - start
        way.close()
        return passed

    return measure


def _staged(manifest: Manifest, layout: Layout, transport: Callable[[], Any]) -> Thing:
    plan = build(manifest, layout)

    def measure() -> float:
        staging, way = Staging(manifest, plan, layout), transport()
        start = time.perf_counter()
        staging.run([way], lambda: None)
        passed = time.perf_counter() - start
        way.close()
        return passed

    return measure


def _timed(act: Callable[[], None]) -> Thing:
    def measure() -> float:
        start = time.perf_counter()
        act()
        return time.perf_counter() - start

    return measure


def _plain_redis(client: Client) -> Callable[[], None]:
    keys = sorted(client.redis.keys("*chunk:chunks.*"))

    def read() -> None:
        for key in keys:
            client.redis.get(key)

    return read


def _plain_file(folder: Path) -> Callable[[], None]:
    (path,) = folder.rglob("*.safetensors")
    buffer = np.empty(path.stat().st_size, np.uint8).data

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            at = 0
            while count := file.readinto(buffer[at : at + PIECE_BYTES]):
                at += count

    return read


def _plain_socket(nbytes: int) -> Callable[[], None]:
    data = memoryview(bytes(nbytes))
    buffer = np.empty(nbytes, np.uint8).data

    def read() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:

            def give() -> None:
                with listening.accept()[0] as there:
                    there.sendall(data)

            giver = threading.Thread(target=give)
            giver.start()
            with socket.create_connection(listening.getsockname()) as here:
                at = 0
                while at < nbytes:
                    at += here.recv_into(buffer[at:])
            giver.join()

    return read
