"""What sessions cost Redis: bytes each, and whether memory comes back after many have closed.

The bound: a row of the slot table holds a state row of 1,064 bytes and about 200 of fields; two
streams whose entries have been trimmed, a member of a set or two and the keys' own names are some
600 bytes more. A frame that waits is 1,600 bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from benchmarks.backlog import Backlog
from benchmarks.hosting import value_of
from benchmarks.measure import Figure, Run, Spread
from benchmarks.model import frames_of, model
from slotstream import Client
from slotstream.embedded import EmbeddedRedis
from slotstream_worker.config import WorkerConfig
from slotstream_worker.worker import Worker


def memory(run: Run) -> Iterator[Figure]:
    """Bytes of Redis a session, through its life."""
    many, turnover = run.pick((2_000, 10_000), (1_000, 2_000))
    with (
        EmbeddedRedis() as redis,
        Client(redis.url) as client,
        run.task("memory of Redis", 6) as advance,
    ):
        worker = Worker(
            WorkerConfig(
                redis=redis.url,
                slots=256,
                max_sessions=many,
                reply_ttl_s=1.0,
                row_counts=(256,),
                checkpoint_interval_s=0.5,
                reply_retention=100,
            ),
            model(),
        )
        worker.prepare()
        _live_through(worker, client, redis.url, [f"w{k}" for k in range(64)])
        empty = _settled(client)

        def note(key: str, what: str, count: int, before: int, beside: int = 0) -> Figure:
            advance()
            value = Spread.of([(_used(client) - before) / count - beside])
            return Figure(key, f"Redis a session: {what}", "", value, unit="B", better="less")

        names = [f"s{k}" for k in range(many)]
        client.open_many(names, new=True)
        _turn_until(worker, lambda: value_of(worker.metrics.sessions) >= many)
        yield note("memory.idle", "open, idle, never a frame", many, empty)
        backlog = Backlog(redis.url, "slotstream", names, frames_of(16))
        idle = _used(client)
        backlog.fill(1)
        yield note("memory.waiting", "and one waiting frame of 1,600 bytes", many, idle)
        _turn_until(worker, lambda: backlog.replies() >= 2 * many)
        _turn_for(worker, 1.1)  # the checkpoints
        backlog.trim()
        state = worker.model.spec.row_bytes
        what = "open, one frame run and saved, replies read, beside its state"
        yield note("memory.redis", what, many, empty, beside=state)
        for name in names:
            client.app.close(name)
        _turn_until(worker, lambda: value_of(worker.metrics.sessions) == 0)
        yield note("memory.closed", "closed, its last reply kept", many, empty)
        _turn_for(worker, 1.5)
        base = _settled(client)
        for start in range(0, turnover, many):
            for s in client.open_many([f"t{start + k}" for k in range(many)], new=True):
                client.app.close(s.id)
            keys = client.app.keys("t0")
            _turn_until(
                worker,
                lambda keys=keys: (
                    not client.link.call("SCARD", keys.sessions)
                    and not client.link.call("XLEN", keys.control)
                ),
            )
        _turn_for(worker, 1.5)
        _settled(client)
        yield note(
            "memory.left", f"left by {turnover:,} that were opened and closed", turnover, base
        )
        backlog.close()
        worker.close()


def _live_through(worker: Worker, client: Client, url: str, names: list[str]) -> None:
    """Sessions that come and go, so that what Redis keeps once and for all is there."""
    client.open_many(names, new=True)
    backlog = Backlog(url, "slotstream", names, frames_of(16))
    backlog.fill(1)
    _turn_until(worker, lambda: backlog.replies() >= 2 * len(names))
    for name in names:
        client.app.close(name)
    _turn_until(worker, lambda: value_of(worker.metrics.sessions) == 0)
    _turn_for(worker, 1.5)
    backlog.close()


def _turn_until(worker: Worker, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not done():
        worker.turn()
        if time.monotonic() > deadline:
            raise TimeoutError("the worker did not get there")


def _turn_for(worker: Worker, seconds: float) -> None:
    until = time.monotonic() + seconds
    _turn_until(worker, lambda: time.monotonic() > until)


def _used(client: Client) -> int:
    text = client.link.call("INFO", "memory", key="").decode()
    return int(text.split("used_memory:")[1].split()[0])


def _settled(client: Client) -> int:
    """Memory once keys that have expired have been taken out."""
    for _ in range(100):
        if client.link.call("DBSIZE", key="") < 20:
            break
        time.sleep(0.1)
    return _used(client)
