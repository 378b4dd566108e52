"""What an operator asks of an app: who works, drain, rebalance, who was set aside."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from slotstream.app import App
from slotstream.errors import Unavailable

_ORDER_TTL_S = 60
_POLL_S = 0.05


@dataclass(frozen=True)
class WorkerSeen:
    """A worker: its id `<name>.<nonce>`, host and process where it is alive, sessions it owns."""

    id: str
    alive: bool
    host: str
    pid: str
    sessions: int


def workers_of(app: App) -> list[WorkerSeen]:
    """All workers that may own something, over all partitions."""
    leases: dict[str, bytes | None] = {}
    owned: dict[str, int] = {}
    for keys in app.partitions():
        for raw in app.link.call("SMEMBERS", keys.workers):
            name = raw.decode()
            leases[name] = leases.get(name) or app.link.call("GET", keys.lease(name))
            owned[name] = owned.get(name, 0) + app.link.call("SCARD", keys.owned(name))
    found = []
    for name, lease in sorted(leases.items()):
        host, _, pid = (lease or b"").decode().partition(" ")
        found.append(WorkerSeen(name, lease is not None, host, pid, owned[name]))
    return found


def show_workers(workers: list[WorkerSeen], app: str) -> None:
    """Print the workers as a table."""
    table = Table(title=f"{len(workers)} workers of {app}", title_justify="left")
    for name in ("worker", "state", "host", "pid"):
        table.add_column(name, no_wrap=True)
    table.add_column("sessions", justify="right")
    for worker in workers:
        state = "alive" if worker.alive else "dead"
        table.add_row(worker.id, state, worker.host, worker.pid, f"{worker.sessions:,}")
    Console().print(table)


def drain_worker(app: App, worker: str, timeout_s: float) -> str:
    """Order a worker to drain and wait until it has left; says what happened.

    Raises:
        Unavailable: there is no such worker alive, or it did not leave in time.
    """
    seen = [w for w in workers_of(app) if worker in (w.id, w.id.rpartition(".")[0])]
    alive = [w for w in seen if w.alive]
    if not alive:
        raise Unavailable(f"no worker {worker!r} is alive; `slotstream workers` shows them")
    for one in alive:
        for keys in app.partitions():
            app.link.call("SET", keys.order(one.id), "drain", "EX", _ORDER_TTL_S)
    deadline = time.monotonic() + timeout_s
    names = {w.id for w in alive}
    while any(w.id in names for w in workers_of(app)):
        if time.monotonic() > deadline:
            raise Unavailable(f"{worker} has not left in {timeout_s:g} s; it may be busy")
        time.sleep(_POLL_S)
    return f"{', '.join(sorted(names))} left; {sum(w.sessions for w in alive)} sessions handed on"


def rebalance_workers(app: App) -> list[str]:
    """Order the workers that hold more than the mean to hand the rest on; a line for each."""
    alive = [worker for worker in workers_of(app) if worker.alive]
    if not alive:
        raise Unavailable("no worker is alive")
    mean = sum(worker.sessions for worker in alive) / len(alive)
    lines = []
    for worker in alive:
        surplus = int(worker.sessions - mean)
        if surplus > 0:
            _shed(app, worker, surplus)
            lines.append(f"{worker.id} hands {surplus} of {worker.sessions} sessions on")
    return lines or [f"nothing to do: {len(alive)} workers hold {mean:.1f} sessions each"]


def _shed(app: App, worker: WorkerSeen, surplus: int) -> None:
    """Order a worker to hand sessions on, from each partition as many as its share of them."""
    asked = seen = 0
    for keys in app.partitions():
        seen += app.link.call("SCARD", keys.owned(worker.id))
        share = surplus * seen // max(worker.sessions, 1) - asked
        if share > 0:
            asked += share
            app.link.call("SET", keys.order(worker.id), f"shed {share}", "EX", _ORDER_TTL_S)


@dataclass(frozen=True)
class Aside:
    """A session that was set aside: at which entry, after how many attempts, when."""

    session: str
    entry: str
    attempts: str
    when: str
    waiting: int


def sessions_aside(app: App) -> list[Aside]:
    """Sessions that were set aside, by name."""
    found = []
    for keys in app.partitions():
        for raw in app.link.call("SMEMBERS", keys.aside):
            session = raw.decode()
            row, entries = f"{keys.prefix}aside:{session}", f"{keys.prefix}aside-in:{session}"
            at, attempts, when = app.link.call("HMGET", row, "at", "attempts", "set_aside")
            moment = datetime.fromtimestamp(int(when or 0), UTC).isoformat(timespec="seconds")
            waiting = app.link.call("XLEN", entries)
            found.append(Aside(session, (at or b"").decode(), (attempts or b"").decode(), moment,
                               waiting))  # fmt: skip
    return sorted(found, key=lambda one: one.session)


def show_aside(sessions: list[Aside], app: str) -> None:
    """Print the sessions as a table."""
    table = Table(title=f"{len(sessions)} sessions of {app} set aside", title_justify="left")
    for name in ("session", "at entry", "since"):
        table.add_column(name, no_wrap=True)
    for name in ("attempts", "entries kept"):
        table.add_column(name, justify="right")
    for one in sessions:
        table.add_row(one.session, one.entry, one.when, one.attempts, str(one.waiting))
    console = Console()
    console.print(table)
    if sessions:
        console.print("`slotstream retry SESSION` puts one back in the queue", highlight=False)
