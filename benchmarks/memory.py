"""What sessions cost Redis: bytes each, and whether memory comes back after many have closed."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.model import model
from slotstream import Client
from slotstream.embedded import EmbeddedRedis
from slotstream_worker.config import WorkerConfig
from slotstream_worker.worker import Worker

MANY = 2_000
TURNOVER = 10_000


def memory(console: Console) -> list[dict[str, Any]]:
    """Measure, print and return the figures; about a minute."""
    frame = np.random.default_rng(0).normal(size=(10, 40)).astype(np.float32)
    with EmbeddedRedis() as redis, Client(redis.url) as client:
        worker = Worker(
            WorkerConfig(
                redis=redis.url, slots=256, max_sessions=MANY, reply_ttl_s=1.0, row_counts=(256,)
            ),
            model(),
        )
        worker.prepare()
        empty = _used(client)
        rows: list[dict[str, Any]] = []

        def note(what: str, count: int, before: int) -> int:
            used = _used(client)
            rows.append({"what": what, "sessions": count, "bytes": (used - before) / count})
            return used

        handles = client.open_many([f"s{k}" for k in range(MANY)], new=True)
        while len(worker.host) < MANY:
            worker.turn()
        idle = note("open, idle, never a frame", MANY, empty)
        client.link.calls([("XADD", s.inbox, "*", "frame", client.app.encode(frame))
                           for s in handles])  # fmt: skip
        note("  and one waiting frame of 1,600 bytes", MANY, idle)
        _turn_until(worker, lambda: client.link.call("XLEN", handles[-1].outbox) >= 2)
        time.sleep(1.1)
        for _ in range(50):
            worker.turn()  # the checkpoints
        client.link.calls([("XTRIM", s.outbox, "MAXLEN", 0) for s in handles])
        note("open, one frame run and checkpointed, replies read and trimmed", MANY, empty)
        for s in handles:
            client.app.close(s.id)
        _turn_until(worker, lambda: not worker.host.hosted)
        note("closed, its last reply kept", MANY, empty)
        time.sleep(1.5)
        base = _settled(client)
        for start in range(0, TURNOVER, MANY):
            names = [f"t{start + k}" for k in range(MANY)]
            for s in client.open_many(names, new=True):
                client.app.close(s.id)
            _turn_until(worker, lambda: not client.link.call("SCARD", "{slotstream:0}:sessions")
                        and not client.link.call("XLEN", "{slotstream:0}:control"))  # fmt: skip
        time.sleep(1.5)
        note(f"after {TURNOVER:,} more were opened and closed", TURNOVER, base)
        worker.drain()
        worker.close()
    table = Table(title="memory of Redis a session", title_justify="left")
    table.add_column("session")
    table.add_column("bytes", justify="right")
    for row in rows:
        table.add_row(row["what"], f"{row['bytes']:,.0f}")
    console.print(table)
    return rows


def _turn_until(worker: Worker, done: Any) -> None:
    deadline = time.monotonic() + 120
    while not done():
        worker.turn()
        if time.monotonic() > deadline:
            raise TimeoutError("the worker did not get there")


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
