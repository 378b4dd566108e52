"""Single steps that the plain tests of the slot table are made of."""

from __future__ import annotations

from typing import Any

from slot_table.store import KEYS, WORKERS, Fields, Store, pairs, stream
from slotstream.ids import ZERO, EntryId
from slotstream_worker.store.table import Answer, Checkpoint, Row

SAVED = Checkpoint(b"state", "layout", "w1")


def opened(store: Store, *sessions: str, replies: str = "", **settings: Any) -> dict[str, Row]:
    """Open sessions and claim them."""
    extra = ("replies", replies) if replies else ()
    for session in sessions:
        store.line.call("XADD", KEYS.control, "*", "op", "open", "session", session, *extra)
    table = store.table(**settings)
    raws = store.line.call("XRANGE", KEYS.control, "-", "+")
    assert table.apply_control([(i, pairs(f)["session"]) for i, f in raws]) == (len(sessions), 0)
    return {row.session: row for row in table.claim(sessions)}


def push(store: Store, session: str, *entries: EntryId) -> None:
    for entry in entries:
        store.line.call("XADD", KEYS.inbox(session), str(entry), "frame", "x")


def answer(entry: EntryId) -> Answer:
    return Answer(entry, ("output", "y"))


def usual(entry: EntryId) -> Answer:
    """An output as a worker writes it: a commit of such alone takes the script's short way."""
    return Answer(entry, ("output", "y", "weights", ""))


def replies(store: Store, session: str) -> list[tuple[EntryId, Fields]]:
    return list(stream(store.line.call("XRANGE", KEYS.outbox(session), "-", "+")).items())


def left(store: Store, session: str) -> list[EntryId]:
    return list(stream(store.line.call("XRANGE", KEYS.inbox(session), "-", "+")))


def status(store: Store, session: str) -> str:
    value = store.line.call("HGET", KEYS.row(session), "status")
    return (value or b"").decode()


def tell(store: Store, session: str, *fields: str) -> EntryId:
    """One more control entry for a session, applied; returns the last id of its `in`."""
    entry = store.line.call("XADD", KEYS.control, "*", "session", session, *fields)
    assert store.table().apply_control([(entry, session)]) == (1, 0)
    return left(store, session)[-1] if left(store, session) else ZERO


def suspicion(store: Store, session: str) -> tuple[int, int]:
    """The attempts and the trial that its row holds."""
    held = store.line.call("HMGET", KEYS.row(session), "attempts", "trial")
    return int(held[0]), int(held[1] or 0)


def kill(store: Store, *, deaths: int = 1, most: int = 1, room: int = 5, tried: bool = True) -> Any:
    """The owner of `a` dies, under trial or in company, and so do those that take it over."""
    for _ in range(deaths):
        old, epoch, cuts = store.line.call("HMGET", KEYS.row("a"), "owner", "epoch", "cuts")
        old = old.decode()
        if tried:
            assert store.table(old).begin_trial("a", epoch, cuts)
        store.lease(*(worker for worker in WORKERS if worker != old))
        other = store.table(WORKERS[2] if old != WORKERS[2] else WORKERS[0], max_attempts=most)
        taken = other.take(sorted(other.owned(old)), old, "dead", room)
        store.lease(*WORKERS)
    return taken


def read_all(store: Store) -> dict[bytes, Any]:
    """Every key's value, as Redis would save it."""
    return {name: store.line.call("DUMP", name) for name in store.line.call("KEYS", "*")}
