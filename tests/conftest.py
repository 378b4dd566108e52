"""Fixtures: a real Redis for each test, workers in threads and in processes."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from slot_table.store import WORKERS, Store
from slotstream import Client
from slotstream.embedded import EmbeddedRedis
from slotstream_worker.config import WorkerConfig
from slotstream_worker.device import set_up
from slotstream_worker.service import serve
from slotstream_worker.worker import Worker

TESTS = Path(__file__).parent

# The same small models are compiled by many tests and by the workers that they start: once is
# enough. Of this run only, so that no other machine's code is ever loaded.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.mkdtemp(prefix="slotstream-compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled  # for workers in processes of their own
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    set_up(Path(compiled))

# A model that mixes dtypes or ranks silently would hide what a row holds.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Modules of assertions that are no tests themselves: a failure shows both sides there too.
pytest.register_assert_rewrite("slot_table.model", "slot_table.ledger", "slot_table.world")


_COMPUTE = {
    *("adapters", "cancel_script", "check_command", "compat", "demo_network", "engine_parity"),
    *("examples", "inputs_and_tails", "layouts", "nir_files", "nir_fuzz", "nir_references"),
    *("nir_semantics", "pool", "probe", "protocol_model", "refusals", "seeds", "slot_control"),
    *("slot_machine", "slot_owners", "slot_table", "sparx_runs", "stream_server", "variables"),
    *("vectors", "weights_manifest", "weights_reshard"),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the modules whose tests wait for nothing but the processor."""
    for item in items:
        if item.path.stem.removeprefix("test_") in _COMPUTE:
            item.add_marker(pytest.mark.compute)


def wait_until(predicate: Callable[[], Any], timeout_s: float = 30.0, what: str = "") -> Any:
    """Poll until `predicate` gives something true; returns it."""
    deadline = time.monotonic() + timeout_s
    while True:
        if value := predicate():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what or predicate}")
        time.sleep(0.005)


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture
def redis_server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    return redis_server.url


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(redis_url, patience_s=10.0) as client:
        yield client


@pytest.fixture(scope="session")
def shared_store() -> Iterator[Store]:
    with EmbeddedRedis() as server:
        store = Store(server.url)
        yield store
        store.close()


@pytest.fixture
def store(shared_store: Store) -> Store:
    """A slot table with nothing in it, whose workers are all alive."""
    shared_store.line.call("FLUSHALL")
    shared_store.lease(*WORKERS)
    return shared_store


class ThreadedWorker:
    """A worker whose loop runs in a thread of the test."""

    def __init__(self, url: str, model: Any, **settings: Any) -> None:
        settings = {"slots": 8, "row_counts": (4,), "sweep_s": 1.0, **settings}
        settings.setdefault("max_sessions", settings["slots"])
        self.worker = Worker(WorkerConfig(redis=url, **settings), model)
        self.stop = threading.Event()
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            serve(self.worker, self.stop, ready=self.ready.set)
        except BaseException as error:
            self.error = error
            self.ready.set()

    def start(self) -> ThreadedWorker:
        self.thread.start()
        assert self.ready.wait(60), "the worker did not start"
        if self.error:
            raise self.error
        return self

    def drain(self) -> None:
        self.stop.set()
        self.thread.join(30)
        assert not self.thread.is_alive(), "the worker did not drain"
        if self.error:
            raise self.error


@pytest.fixture
def thread_worker(redis_url: str) -> Iterator[Callable[..., ThreadedWorker]]:
    started: list[ThreadedWorker] = []

    def start(model: Any, **settings: Any) -> ThreadedWorker:
        started.append(ThreadedWorker(redis_url, model, **settings).start())
        return started[-1]

    yield start
    for worker in started:
        if worker.thread.is_alive():
            worker.drain()


class WorkerProcess:
    """A `slotstream worker` of the test's own, ended by its pid."""

    def __init__(
        self, url: str, log: Path, *options: str, model: str = "serving_models:served"
    ) -> None:
        self.log = log
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        command = [
            sys.executable,
            "-m",
            "slotstream.cli",
            "worker",
            "--redis",
            url,
            "--model",
            model,
            "--row-counts",
            "4",
            "--slots",
            "16",
            *options,
        ]
        with log.open("a") as out:
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    @property
    def text(self) -> str:
        return self.log.read_text()

    def wait_ready(self, times: int = 1) -> WorkerProcess:
        def ready() -> bool:
            assert self.process.poll() is None, f"the worker ended early:\n{self.text}"
            return self.text.count("serving, in launches") >= times

        wait_until(ready, 60, "the worker serves")
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.fixture
def worker_process(redis_url: str, tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    started: list[WorkerProcess] = []

    def start(*options: str, log: str = "worker.log", **settings: str) -> WorkerProcess:
        process = WorkerProcess(
            redis_url,
            tmp_path / log,
            "--compile-cache",
            str(tmp_path / "compiled"),
            *options,
            **settings,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.process.poll() is None:
            process.kill()


def streams_of(
    sessions: int, frames: int, shape: tuple[int, ...], seed: int = 0, dtype: Any = np.float32
) -> dict[str, np.ndarray[Any, Any]]:
    """Different streams, `[frames, *shape]` each: normal noise over a slow wave."""
    rng = np.random.default_rng(seed)
    wave = np.sin(np.arange(frames) / 3).reshape(-1, *[1] * len(shape))
    return {
        f"s{k}": (rng.normal(size=(frames, *shape)) + wave * rng.normal()).astype(dtype)
        for k in range(sessions)
    }
