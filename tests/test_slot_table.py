"""The slot table's scripts on a real Redis, against a plain model of what they must do.

Random schedules of producers, workers and operators, each fixed by its seed, are run, and after
every action all that Redis holds is compared with the model. Workers that lost a session keep
acting on it, and commits are composed early, delivered late and repeated.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from random import Random
from typing import Any

import msgpack
import pytest
import redis

from slotstream.embedded import EmbeddedRedis
from slotstream.endpoint import Endpoint
from slotstream.ids import OPENED, ZERO, EntryId
from slotstream.lines import Arg, Line, Script
from slotstream.names import Keys
from slotstream_worker.store.luascripts import script
from slotstream_worker.store.table import Answer, Checkpoint, Commit, Row, SlotTable

TOP = 2**64 - 1
KEYS = Keys("demo")
SESSIONS = ("a", "a/1", "B.:-")
WORKERS = ("x.1", "x.2", "y.1")
KINDS = ("slot", "in", "out", "aside", "aside-in")
SCHEDULES = int(os.environ.get("SLOT_TABLE_SCHEDULES", "72"))
ACTIONS_EACH = 150
RETENTION = 5
"""Small, so that sessions that wait for their reader pause; `MAXLEN ~` trims nothing so short."""
TTL_S = 3600.0
CANCEL = Script("cancel", (files("slotstream") / "cancel.lua").read_text())

Fields = dict[str, str]


def key(kind: str, session: str) -> str:
    return f"{KEYS.prefix}{kind}:{session}"


def pairs(flat: Sequence[bytes]) -> Fields:
    """An entry's fields as text; of an error only its code."""
    found = dict(zip(flat[::2], flat[1::2], strict=True))
    if b"error" in found:
        found[b"error"] = msgpack.unpackb(found[b"error"])["code"].encode()
    return {name.decode(): value.decode() for name, value in found.items()}


def error(code: str) -> bytes:
    packed = msgpack.packb({"code": code, "message": ""})
    assert isinstance(packed, bytes)
    return packed


def fold(state: bytes, entry: EntryId) -> bytes:
    """The served model: its state tells which entries it has run, in order."""
    return hashlib.sha1(state + str(entry).encode()).hexdigest().encode()


class Watched(Line):
    """A line that notes which keys each script was given."""

    declared: set[str]

    def send_script(self, script: Script, keys: Sequence[Arg], args: Sequence[Arg]) -> None:
        self.declared.update(map(str, keys))
        super().send_script(script, keys, args)


class Store:
    """One Redis, and a connection for each worker and for the test itself."""

    def __init__(self, url: str) -> None:
        pool = Endpoint(url, name="test").pool(KEYS.control)
        self.line = Line(pool)
        self.lines = {worker: Watched(pool) for worker in WORKERS}
        self.declared: set[str] = set()
        for line in self.lines.values():
            line.declared = self.declared

    def table(
        self,
        worker: str = WORKERS[0],
        *,
        max_attempts: int = 3,
        declares: bool = False,
        retention: int = RETENTION,
    ) -> SlotTable:
        return SlotTable(self.lines[worker], KEYS, worker, reply_ttl_s=TTL_S, retention=retention,
                         max_attempts=max_attempts, declares=declares)  # fmt: skip

    def retry(self, session: str, epoch: Arg | None = None, what: str = "retry") -> str:
        """As the command `slotstream retry` calls it; `epoch` is by default that of the row."""
        names = [KEYS.control, *KEYS.shared(), *KEYS.of(session)]
        if epoch is None:
            epoch = self.line.call("HGET", key("aside", session), "epoch") or b""
        answer: bytes = self.lines[WORKERS[0]].script(
            script("retry"), names, [KEYS.prefix, 0, 0, 3, session, epoch, what]
        )
        return answer.decode()

    def lease(self, *workers: str) -> None:
        """These workers count as alive, and only these."""
        self.line.calls([("DEL", KEYS.lease(worker)) for worker in WORKERS])
        for worker in workers:
            self.line.calls([("SADD", KEYS.workers, worker), ("SET", KEYS.lease(worker), "here")])

    def close(self) -> None:
        for line in (self.line, *self.lines.values()):
            line.close()


@pytest.fixture(scope="module")
def shared_store() -> Iterator[Store]:
    with EmbeddedRedis() as server:
        store = Store(server.url)
        yield store
        store.close()


@pytest.fixture
def store(shared_store: Store) -> Store:
    shared_store.line.call("FLUSHALL")
    shared_store.lease(*WORKERS)
    return shared_store


# The model


@dataclass
class Stream:
    entries: dict[EntryId, Fields] = field(default_factory=dict)
    last: EntryId = ZERO

    def add(self, entry: EntryId, fields: Fields) -> None:
        assert entry > self.last
        self.entries[entry], self.last = fields, entry

    def after(self, entry: EntryId) -> dict[EntryId, Fields]:
        return {i: f for i, f in self.entries.items() if i > entry}


@dataclass
class Held:
    """A row, and what a test can know beside it."""

    token: str
    replies: str
    status: str = "waiting"
    owner: str = ""
    epoch: int = 0
    cursor: EntryId = ZERO
    done: EntryId = ZERO
    state: bytes = b""
    layout: str = ""
    weights: str = ""
    count: int = 0
    skipped: list[EntryId] = field(default_factory=list)
    cuts: int = 0
    attempts: int = 0
    trial: int = 0
    mark: EntryId | None = None
    now: bytes = b""
    """The state after `done`, as every owner must come to it."""
    answered: list[EntryId] = field(default_factory=list)
    """What has got a reply that must be in `out`."""

    def fields(self) -> dict[str, Any]:
        return {
            "status": self.status, "owner": self.owner, "epoch": str(self.epoch),
            "cursor": str(self.cursor), "done": str(self.done), "state": self.state.decode(),
            "layout": self.layout, "weights": self.weights, "count": str(self.count),
            "skipped": list(map(str, self.skipped)), "cuts": str(self.cuts),
            "attempts": str(self.attempts), "trial": str(self.trial), "token": self.token,
            "mark": str(self.mark) if self.mark else "", "replies": self.replies,
        }  # fmt: skip


@dataclass
class Slot:
    """All that is kept of one session's name."""

    row: Held | None = None
    tomb: dict[str, str] | None = None
    inbox: Stream | None = None
    out: Stream | None = None
    out_expires: bool = False
    aside: tuple[Held, str] | None = None
    aside_in: Stream | None = None
    superseded: bool = False

    def behind(self, entry: EntryId) -> dict[EntryId, Fields]:
        return self.inbox.after(entry) if self.inbox else {}

    def unanswered(self) -> list[EntryId]:
        assert self.row
        return [i for i in self.behind(self.row.done) if i != self.row.mark]

    def largest(self) -> EntryId:
        """The larger of the last generated ids of `in` and `out`."""
        return max(stream.last if stream else ZERO for stream in (self.inbox, self.out))


class Model:
    """What Redis must hold, by the rules of WIRE.md."""

    def __init__(self, max_attempts: dict[str, int]) -> None:
        self.max_attempts = max_attempts  # each worker's own: they may be configured differently
        self.slots = {session: Slot() for session in SESSIONS}
        self.queue: dict[str, tuple[int, int]] = {}
        self.arrivals = 0
        self.sessions: set[str] = set()
        self.owned: dict[str, set[str]] = defaultdict(set)
        self.workers: set[str] = set()
        self.leases: set[str] = set()
        self.aside: set[str] = set()
        self.control: Stream | None = None
        self.epoch = 0

    # Control

    def apply(self, ids: Iterable[EntryId]) -> tuple[int, int]:
        applied = ignored = 0
        assert self.control
        for entry in ids:
            oldest = next(iter(self.control.entries), None)
            if oldest is None or entry > oldest:
                break
            if entry == oldest:
                fields = self.control.entries.pop(entry)
                understood = fields.get("session") in self.slots and (
                    fields.get("op") == "close"
                    or (fields.get("op") == "open" and len(fields.get("token", "")) <= 64)
                )
                applied, ignored = applied + understood, ignored + (not understood)
                if understood:
                    getattr(self, fields["op"])(fields["session"], fields)
        return applied, ignored

    def open(self, session: str, fields: Fields) -> None:
        slot, token = self.slots[session], fields.get("token", "")
        if slot.row or (slot.tomb and token and slot.tomb["token"] == token):
            return
        slot.tomb = slot.out = None
        slot.out_expires = False
        slot.superseded = slot.aside is not None
        slot.row = Held(token, fields.get("replies", ""))
        self.sessions.add(session)
        self.enqueue(session, 1)

    def close(self, session: str, _fields: Fields) -> None:
        row = self.slots[session].row
        if row and row.status == "waiting":
            self.finish(session, "close")
        elif row and row.status == "live":
            row.status = "closing"  # the mark's id is Redis's to give: see `marked`

    def enqueue(self, session: str, order: int) -> None:
        self.arrivals += 1
        self.queue[session] = (order, self.arrivals)

    # Ends

    def finish(self, session: str, reason: str, at: Answer | None = None, mark: str = "") -> None:
        slot = self.slots[session]
        row = slot.row
        assert row
        marks = {str(row.mark), mark}
        behind = [i for i in slot.behind(at.id if at else row.done) if str(i) not in marks]
        fields = pairs([as_bytes(v) for v in at.fields]) if at else {}
        fields.update(end="1", reason=reason, cancelled=str(len(behind)))
        self.bury(session, row, at.id if at else slot.largest().next(), fields)

    def bury(self, session: str, row: Held | None, last: EntryId, fields: Fields) -> None:
        slot = self.slots[session]
        slot.out = slot.out or Stream()
        slot.out.add(last, fields)
        slot.tomb = {"status": "closed", "token": row.token if row else "", "end": str(last)}
        slot.row = slot.inbox = None
        slot.out_expires = True
        self.queue.pop(session, None)
        self.sessions.discard(session)
        if row:
            self.owned[row.owner].discard(session)

    def set_aside(self, session: str) -> None:
        slot = self.slots[session]
        row, waits = slot.row, slot.unanswered()
        assert row
        # An answer to the entry it stood at; without one, as every last reply without an entry.
        last = waits[0] if waits else slot.largest().next()
        slot.aside, slot.aside_in = (row, str(waits[0]) if waits else ""), slot.inbox
        slot.superseded = False
        self.aside.add(session)
        self.bury(session, row, last, {"error": "quarantined", "end": "1", "reason": "quarantined",
                                       "cancelled": str(max(len(waits) - 1, 0))})  # fmt: skip

    def retry(self, session: str, epoch: str, what: str) -> str:
        slot = self.slots[session]
        if not slot.aside or str(slot.aside[0].epoch) != epoch:
            return "gone"
        if what == "retry":
            if slot.row:
                return "open"
            if slot.superseded:
                return "superseded"
            if slot.inbox:
                return "busy"
            slot.row, slot.inbox = slot.aside[0], slot.aside_in
            slot.tomb = slot.out = None
            slot.out_expires = False
            slot.row.status, slot.row.owner, slot.row.answered = "waiting", "", []
            slot.row.attempts = slot.row.trial = 0
            self.sessions.add(session)
            self.enqueue(session, 1)
        slot.aside = slot.aside_in = None
        slot.superseded = False
        self.aside.discard(session)
        return "ok"

    def forget(self, last_ids: dict[str, EntryId]) -> int:
        told = 0
        for session, last in last_ids.items():
            slot = self.slots[session]
            if not (slot.row or slot.tomb):
                # Nobody knows `done` any more, but what `out` holds has been answered.
                waits = [f for f in slot.behind(slot.out.last if slot.out else ZERO).values()
                         if f.get("op") != "close"]  # fmt: skip
                self.bury(session, None, max(slot.largest(), last).next(),
                          {"error": "forgotten", "end": "1", "reason": "forgotten",
                           "cancelled": str(len(waits))})  # fmt: skip
                told += 1
        return told

    # Owners

    def own(self, session: str, worker: str) -> str:
        slot = self.slots[session]
        row = slot.row
        assert row
        self.owned[row.owner].discard(session)
        self.owned[worker].add(session)
        self.queue.pop(session, None)
        row.status, row.owner, row.trial = "live", worker, 0
        if not slot.out:
            slot.out = Stream()
            slot.out.add(OPENED, {"op": "opened", "worker": worker})
        return session

    def requeue(self, session: str) -> None:
        row = self.slots[session].row
        assert row
        if row.status == "closing":
            return self.finish(session, "close")
        self.owned[row.owner].discard(session)
        row.status, row.owner = "waiting", ""
        return self.enqueue(session, 0)

    def claim(self, worker: str, sessions: Sequence[str]) -> list[str]:
        claimed: list[str] = []
        if worker not in self.leases:
            return claimed
        for session in sessions:
            row = self.slots[session].row
            if row and row.status == "waiting":
                if row.attempts >= self.max_attempts[worker]:
                    self.set_aside(session)
                else:
                    claimed.append(self.own(session, worker))
            else:
                self.queue.pop(session, None)
        return claimed

    def take(
        self, worker: str, old: str, why: str, room: int, sessions: Sequence[str]
    ) -> tuple[list[str], int, int, int]:
        taken: list[str] = []
        put_back = closed = aside = 0
        if (why == "dead" and old in self.leases) or (why != "leave" and worker not in self.leases):
            return taken, put_back, closed, aside
        for session in sessions:
            row = self.slots[session].row
            if not row or row.status == "waiting" or row.owner != old:
                self.owned[old].discard(session)
                continue
            if row.status == "closing":
                self.finish(session, "close")
                closed += 1
                continue
            died = why in ("dead", "name")
            if died and self.slots[session].behind(row.cursor):
                # The deaths of a whole company count to two, then only those of its own trials.
                row.attempts += row.attempts < 2 or row.trial == row.epoch
            if died and row.attempts >= self.max_attempts[worker]:
                self.set_aside(session)
                aside += 1
            elif len(taken) < room:
                taken.append(self.own(session, worker))
            elif why != "self":
                self.requeue(session)
                put_back += 1
        if why in ("dead", "name") and not self.owned[old]:
            self.workers.discard(old)
        return taken, put_back, closed, aside

    def fenced(self, worker: str, session: str, epoch: bytes) -> Held | None:
        row = self.slots[session].row
        held = row and row.status != "waiting" and row.owner == worker and row.epoch == int(epoch)
        return row if held else None

    def begin_trial(self, worker: str, session: str, epoch: bytes, cuts: bytes) -> bool:
        row = self.fenced(worker, session, epoch)
        if not row or row.cuts != int(cuts):
            return False
        row.trial = row.epoch
        return True

    def commit(self, worker: str, commit: Commit) -> str:
        session, slot = commit.session, self.slots[commit.session]
        row = self.fenced(worker, session, commit.epoch)
        if not row:
            return "lost"
        row.trial = 0  # its owner has lived through it, whatever becomes of the commit
        if row.cuts != int(commit.cuts):
            return "lost"
        answers = list(commit.answers)
        last = answers[-1].id if answers else commit.base
        if row.done != commit.base:
            return "applied" if row.done == last else "lost"
        if commit.reason == "idle" and slot.behind(last):
            return "busy"
        assert slot.out
        if answers and answers[0].id <= slot.out.last:
            return "refused"
        closing = answers.pop() if answers and commit.reason == "end" else None
        for answer in answers:
            assert slot.inbox
            slot.out.add(answer.id, pairs([as_bytes(value) for value in answer.fields]))
            row.answered.append(answer.id)
            row.now = fold(row.now, answer.id) if answer.effect else row.now
            row.count += 1
            row.skipped += [] if answer.effect else [answer.id]
            row.attempts, row.done = 0, answer.id
        if commit.action == "end":
            self.finish(session, commit.reason, closing, commit.mark)
            return "ok"
        if commit.checkpoint:
            row.state, row.layout = commit.checkpoint.state, commit.checkpoint.layout
            row.weights, row.cursor, row.count, row.skipped = commit.checkpoint.weights, last, 0, []
            if slot.inbox:
                slot.inbox.entries = slot.inbox.after(last)
        replies = len(slot.out.entries)
        if commit.action == "handback":
            replies += row.status == "closing"
            self.requeue(session)
        return "full" if row.replies == "wait" and replies >= RETENTION else "ok"

    # Producers

    def cancel(self, session: str, entry: EntryId) -> int:
        slot = self.slots[session]
        if slot.row and entry <= slot.row.done:
            return -1
        if not slot.inbox or entry not in slot.inbox.entries:
            return 0
        if slot.row:
            slot.row.cuts += 1
            if entry == min(slot.behind(slot.row.done)):
                slot.row.attempts = slot.row.trial = 0  # what it was suspected for is gone
        del slot.inbox.entries[entry]
        return 1

    def expected(self) -> dict[str, Any]:
        """Everything that Redis must hold, as `read` gives it."""
        found: dict[str, Any] = {
            "queue": sorted(self.queue, key=lambda session: self.queue[session]),
            "sessions": self.sessions, "workers": self.workers, "aside": self.aside,
            "control": dict(self.control.entries) if self.control else {},
        }  # fmt: skip
        exist = {KEYS.lease(worker) for worker in self.leases}
        for worker in WORKERS:
            found[f"owned {worker}"] = self.owned[worker]
            exist |= {KEYS.owned(worker)} if self.owned[worker] else set()
        for session, slot in self.slots.items():
            aside = None
            if slot.aside:
                aside = {**slot.aside[0].fields(), "at": slot.aside[1]}
                aside |= {"superseded": "1"} if slot.superseded else {}
            values = (slot.row.fields() if slot.row else slot.tomb, slot.inbox, slot.out, aside,
                      slot.aside_in)  # fmt: skip
            for kind, value in zip(KINDS, values, strict=True):
                found[key(kind, session)] = (
                    dict(value.entries) if isinstance(value, Stream) else value or {}
                )
                exist |= {key(kind, session)} if value is not None else set()
            found[f"expire {session}"] = (bool(slot.tomb), slot.out_expires)
        for name, value in (("waiting", self.queue), ("sessions", self.sessions),
                            ("aside", self.aside), ("workers", self.workers)):  # fmt: skip
            exist |= {KEYS.prefix + name} if value else set()
        exist |= {KEYS.control} if self.control else set()
        return {**found, "keys": exist}


def as_bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value


def read(line: Line) -> dict[str, Any]:
    """All that Redis holds of the partition."""
    per_session = [
        (("HGETALL", key(kind, s)) if kind in ("slot", "aside")
         else ("XRANGE", key(kind, s), "-", "+"))
        for s in SESSIONS for kind in KINDS
    ]  # fmt: skip
    expiry = [("PTTL", key(kind, s)) for s in SESSIONS for kind in ("slot", "out")]
    owned = [("SMEMBERS", KEYS.owned(worker)) for worker in WORKERS]
    answers = iter(line.calls([
        ("ZRANGE", KEYS.waiting, 0, -1), ("SMEMBERS", KEYS.sessions), ("SMEMBERS", KEYS.workers),
        ("SMEMBERS", KEYS.aside), ("XRANGE", KEYS.control, "-", "+"), ("KEYS", "*"),
        *per_session, *expiry, *owned,
    ]))  # fmt: skip
    found: dict[str, Any] = {
        "queue": [raw.decode() for raw in next(answers)],
        "sessions": names(next(answers)), "workers": names(next(answers)),
        "aside": names(next(answers)), "control": stream(next(answers)),
        "keys": names(next(answers)) - {KEYS.epoch},
    }  # fmt: skip
    for command in per_session:
        found[command[1]] = stream(next(answers)) if command[0] == "XRANGE" else row(next(answers))
    for session in SESSIONS:
        ttls = (next(answers), next(answers))
        assert all(ttl < 0 or TTL_S * 900 < ttl <= TTL_S * 1000 for ttl in ttls)
        found[f"expire {session}"] = tuple(ttl > 0 for ttl in ttls)
    for worker in WORKERS:
        found[f"owned {worker}"] = names(next(answers))
    return found


def names(raws: Iterable[bytes]) -> set[str]:
    return {raw.decode() for raw in raws}


def stream(raws: Sequence[tuple[bytes, list[bytes]]]) -> dict[EntryId, Fields]:
    return {EntryId.parse(entry): pairs(fields) for entry, fields in raws}


def row(flat: Sequence[bytes]) -> dict[str, Any]:
    found: dict[str, Any] = pairs(flat)
    if "skipped" in found:
        found["skipped"] = found["skipped"].split()
        assert 0 < int(found.pop("opened")) <= time.time() + 5
    if "at" in found:
        assert 0 < int(found.pop("set_aside")) <= time.time() + 5
    return found


# The schedules


@dataclass
class View:
    """A session as a worker believes to hold it; it may have lost it long ago."""

    worker: str
    session: str
    epoch: bytes
    cuts: bytes
    base: EntryId
    state: bytes
    before: EntryId = ZERO
    stale: bool = False


@dataclass
class Composed:
    """A commit, who sends it, of which view, and the state its view has after it."""

    worker: str
    view: View
    commit: Commit
    state: bytes


ACTIONS = {  # how often each is drawn
    "push": 7, "push_more": 3, "control": 6, "apply": 7, "cancel": 2, "delete_unread": 1,
    "delete_closed": 1, "claim": 8, "serve": 9, "commit": 15, "prepare": 3, "deliver": 3,
    "repeat": 4, "begin_trial": 4, "lease": 3, "take": 3, "die": 4, "leave": 1, "hold_again": 4,
    "retry": 3, "lose_row": 1, "forget": 4,
}  # fmt: skip


class Schedule:
    """A schedule that its seed fixes, and everything that it acts on."""

    def __init__(self, store: Store, seed: int) -> None:
        """Start anew, with sessions in every state and with entries already."""
        self.store = store
        self.rng = rng = Random(seed)
        declares = rng.random() < 0.5
        store.line.call("FLUSHALL")
        self.declares = declares
        # As a rule the same for all; who allows less sets aside what another has put back.
        usual = rng.randint(1, 4)
        most = {worker: rng.choice([usual, usual, rng.randint(1, 4)]) for worker in WORKERS}
        self.model = Model(most)
        self.tables = {
            worker: store.table(worker, max_attempts=most[worker], declares=declares)
            for worker in WORKERS
        }
        self.views: list[View] = []
        self.prepared: list[Composed] = []
        self.sent: list[Composed] = []
        self.heard: list[tuple[bytes, str]] = []
        self.untouched: set[str] = set()
        self.by_hand: set[str] = set()
        self.lost_rows: set[str] = set()
        store.declared.clear()
        self.seen = read(store.line)
        for worker in WORKERS:
            self.have_lease(worker, True)
        for session in SESSIONS[rng.choice([0, 0, 0, 1]) :]:
            self.send(session, "open", rng.choice(["", "t"]), rng.choice(["", "wait"]))
            self.apply_now(WORKERS[0])
            if rng.random() < 0.8:
                self.claim_now(rng.choice(WORKERS), [session])
            for _ in range(rng.choice([0, 1, 2, 5])):
                self.add(session, "ok", "*")
            if rng.random() < 0.2:
                self.send(session, "close")
                self.apply_now(WORKERS[0])
                if rng.random() < 0.5:
                    self.add(session, "ok", "*")
        if rng.random() < 0.2:
            self.have_lease(rng.choice(WORKERS), False)
        self.check()

    def run(self, actions: int) -> None:
        done = []
        for name in self.rng.choices(list(ACTIONS), list(ACTIONS.values()), k=actions):
            done.append(name)
            try:
                getattr(self, name)(self.rng)
                self.check()
            except Exception as failure:
                failure.add_note(f"after {len(done)} actions, the last of which {done[-9:]}")
                raise

    def call(self, *command: Arg) -> Any:
        self.by_hand.update(map(str, command[1:]))
        return self.store.line.call(*command)

    # Producers

    def push(self, rng: Random) -> None:
        kind = rng.choice([*["ok"] * 8, "bad", "bad", "end", "bad end"])
        how = rng.choice(["*", "*", "next", "again", "far", "sequence"])
        self.add(rng.choice(SESSIONS), kind, how)

    def push_more(self, rng: Random) -> None:
        session = rng.choice(SESSIONS)
        for how in ("*", "next", "*"):
            self.add(session, "ok", how)

    def add(self, session: str, kind: str, how: str) -> None:
        slot = self.model.slots[session]
        last = slot.inbox.last if slot.inbox else ZERO
        entry = {
            "*": None,
            "next": EntryId(last.ms + 1, 0),
            "again": last,
            "far": EntryId(max(last.ms + 1, 2**53), 2**53),
            "sequence": EntryId(max(last.ms, 1), last.seq + 1),
        }[how]
        fields = {"frame": kind.split(maxsplit=1)[0], **({"end": "1"} if "end" in kind else {})}
        flat = [part for pair in fields.items() for part in pair]
        command = ("XADD", KEYS.inbox(session), str(entry or "*"), *flat)
        if how == "again":
            with pytest.raises(redis.ResponseError):
                self.call(*command)
            return
        entry = EntryId.parse(self.call(*command))
        slot.inbox = slot.inbox or Stream()
        slot.inbox.add(entry, fields)

    def control(self, rng: Random) -> None:
        session = rng.choice(SESSIONS)
        token = rng.choice(["", "t", "t", "u", "t" * 64, "t" * 65])
        slot = self.model.slots[session]
        kept = slot.row.token if slot.row else (slot.tomb or {}).get("token")
        if kept and rng.random() < 0.3:
            token = kept  # an `open` whose answer was lost is sent again
        op = rng.choice([*["open"] * (2 if slot.row else 7), "close", "close", "reset"])
        self.send(session, op, token, rng.choice(["", "", "wait"]))

    def send(self, session: str, op: str, token: str = "", replies: str = "") -> None:
        fields = {"op": op, "session": session, "token": token, "replies": replies}
        flat = [part for name, value in fields.items() if value for part in (name, value)]
        entry = self.call("XADD", KEYS.control, "*", *flat)
        self.model.control = self.model.control or Stream()
        self.model.control.add(EntryId.parse(entry), pairs([as_bytes(part) for part in flat]))

    def cancel(self, rng: Random) -> None:
        session = rng.choice(SESSIONS)
        slot = self.model.slots[session]
        known = [*(slot.inbox.entries if slot.inbox else ()), EntryId(7, 7)]
        oldest = slot.unanswered()[:1] if slot.row else []
        self.cancel_now(session, rng.choice([rng.choice(known), *oldest]))

    def cancel_now(self, session: str, entry: EntryId) -> None:
        answer = self.store.lines[WORKERS[0]].script(
            CANCEL, [KEYS.row(session), KEYS.inbox(session)], [str(entry)]
        )
        assert answer == self.model.cancel(session, entry)

    def delete_unread(self, rng: Random) -> None:
        session = rng.choice(SESSIONS)
        slot = self.model.slots[session]
        reading = {
            answer.id
            for one in self.prepared
            if one.commit.session == session
            for answer in one.commit.answers
        }
        done = slot.row.done if slot.row else ZERO
        unread = [i for i, fields in slot.behind(done).items()
                  if i not in reading and "op" not in fields]  # fmt: skip
        if unread:
            assert slot.inbox
            entry = rng.choice(unread)
            del slot.inbox.entries[entry]
            assert self.call("XDEL", KEYS.inbox(session), str(entry)) == 1

    def delete_closed(self, rng: Random) -> None:
        """As who uses an id again does, after its end."""
        session = rng.choice(SESSIONS)
        slot = self.model.slots[session]
        if not slot.row and session not in self.lost_rows:
            self.call("DEL", KEYS.inbox(session), KEYS.outbox(session))
            slot.inbox = slot.out = None
            slot.out_expires = False

    # Workers

    def apply(self, rng: Random) -> None:
        count = rng.choice([1, 2, 9])
        self.apply_now(rng.choice(WORKERS), count, rng.choice(["", "", "long ago", "later ones"]))

    def apply_now(self, worker: str, count: int = 9, how: str = "") -> None:
        """Apply what was read just now; or what was long ago, or not from the start."""
        model = self.model
        if not model.control:
            return
        raws = self.store.line.call("XRANGE", KEYS.control, "-", "+", "COUNT", count)
        entries = [(entry, pairs(fields)["session"]) for entry, fields in raws]
        if how:
            entries = [*(self.heard if how == "long ago" else ()), *entries[1:]]
        self.heard = entries
        answer = self.tables[worker].apply_control(entries)
        assert answer == model.apply([EntryId.parse(entry) for entry, _ in entries])
        for session, slot in model.slots.items():
            row = slot.row
            if row and row.status == "closing" and not row.mark:
                # The mark is new, and the last of `in`.
                (entry, flat), *_ = self.store.line.call(
                    *("XREVRANGE", KEYS.inbox(session), "+", "-", "COUNT", 1)
                )
                assert pairs(flat) == {"op": "close"}
                row.mark = EntryId.parse(entry)
                slot.inbox = slot.inbox or Stream()
                slot.inbox.add(row.mark, {"op": "close"})

    def claim(self, rng: Random) -> None:
        front = [raw.decode() for raw in self.store.line.call("ZRANGE", KEYS.waiting, 0, -1)]
        if rng.random() < 0.3:
            front = rng.sample(SESSIONS, len(SESSIONS))
        self.claim_now(self.anyone(rng), front[: rng.randint(1, 3)])

    def anyone(self, rng: Random) -> str:
        """A worker, and most often one that is alive."""
        return rng.choice([*WORKERS, *[w for w in WORKERS if w in self.model.leases] * 4])

    def serve(self, rng: Random) -> None:
        """A session that is not held, opened anew perhaps, gets an owner and entries."""
        held = {view.session for view in self.views if self.holds(view)}
        session = rng.choice([s for s in SESSIONS if s not in held] or SESSIONS)
        if not self.model.slots[session].row:
            self.send(session, "open", rng.choice(["", "t", "u"]), rng.choice(["", "wait"]))
            self.apply_now(WORKERS[0])
        row = self.model.slots[session].row
        if row and row.owner:
            self.take_now(row.owner, row.owner, "self", 3)
        else:
            self.claim_now(self.anyone(rng), [session])
        for _ in range(rng.choice([0, 1, 2, 3])):
            self.add(session, "ok", "*")

    def claim_now(self, worker: str, sessions: Sequence[str]) -> None:
        rows = self.tables[worker].claim(sessions)
        assert [row.session for row in rows] == self.model.claim(worker, sessions)
        self.adopt(worker, rows)

    def adopt(self, worker: str, rows: Sequence[Row]) -> None:
        """Go on from the rows, as recovery does, and come to the state of uninterrupted runs."""
        for row in rows:
            held = self.model.slots[row.session].row
            assert held
            held.epoch = int(row.epoch)
            assert held.epoch > self.model.epoch, "epochs only rise"
            self.model.epoch = held.epoch
            assert row.attempts == held.attempts
            raws = self.store.line.call(
                *("XRANGE", KEYS.inbox(row.session), f"({row.cursor}", str(row.done))
            )
            entries = [EntryId.parse(entry) for entry, _ in raws]
            assert len(entries) == row.count, "a replay gap"
            state = row.state
            for entry in entries:
                state = state if entry in row.skipped else fold(state, entry)
            assert state == held.now, "the next owner must come to the same state"
            self.views.append(View(worker, row.session, row.epoch, row.cuts, row.done, state))
        others = [view for view in self.views if not self.holds(view)]
        self.views = [view for view in self.views if self.holds(view)] + others[-4:]

    def commit(self, rng: Random) -> None:
        worker = rng.choice(["", "", "", *WORKERS])
        count = rng.randint(1, 3) if worker else 1
        self.deliver_all([one for _ in range(count) if (one := self.compose(rng, worker))])

    def prepare(self, rng: Random) -> None:
        if one := self.compose(rng):
            self.prepared = [*self.prepared[-3:], one]

    def deliver(self, rng: Random) -> None:
        if self.prepared:
            first = rng.choice(self.prepared)
            chosen = [one for one in self.prepared if one.worker == first.worker]
            self.prepared = [one for one in self.prepared if one.worker != first.worker]
            self.deliver_all(chosen)

    def repeat(self, rng: Random) -> None:
        """Send again what may have been carried out, its answer cut off."""
        if self.sent:
            self.deliver_all([rng.choice([self.sent[-1], rng.choice(self.sent)])])

    def compose(self, rng: Random, worker: str = "") -> Composed | None:
        """A commit such as a worker makes; or one that is not as its session's row."""
        views = [v for v in self.views if not worker or v.worker == worker]
        views += [v for v in views if self.holds(v)] * 6
        if not views:
            return None
        view = rng.choice(views)
        most, fail = rng.choice([1, 2, 3, 9, 0]), rng.choice([0, 0, 1, 2, 7])
        answers: list[Answer] = []
        state, action, reason, mark = view.state, "", "", ""
        for k, (entry, fields) in enumerate(
            self.model.slots[view.session].behind(view.base).items()
        ):
            if k == most:
                break
            if "op" in fields:
                action, reason, mark = "end", "close", str(entry)
                break
            effect = fields["frame"] == "ok" and not fail >> k & 1
            reply = ("output", fields["frame"]) if effect else ("error", error("launch"))
            answers.append(Answer(entry, reply, effect))
            state = fold(state, entry) if effect else state
            if "end" in fields:
                action, reason = "end", "end"
                break
        if not action or rng.random() < 0.1:
            action, reason = rng.choice([
                ("", ""), ("", ""), ("", ""), ("", ""), ("", ""), ("handback", ""),
                ("handback", ""), ("end", "idle"), ("end", rng.choice(["close", "replay_gap"])),
            ])  # fmt: skip
        saved = Checkpoint(state, "l1", f"w{len(answers)}") if rng.random() < 0.5 else None
        epoch, cuts, base, sender = view.epoch, view.cuts, view.base, view.worker
        match rng.choice(["epoch", "owner", "cuts", "earlier", "before", "later"] + [""] * 14):
            case "epoch":
                epoch = str(int(epoch) - 1).encode()
            case "owner":
                sender = WORKERS[WORKERS.index(sender) - 1]
            case "cuts":
                cuts = str(int(cuts) + 1).encode()
            case "earlier":
                base = view.before
            case "before":
                base = EntryId(base.ms, base.seq - 1) if base.seq else EntryId(max(base.ms - 1, 0))
            case "later":
                base = answers[0].id if len(answers) > 1 else base.next()
        commit = Commit(view.session, epoch, cuts, base, tuple(answers),
                        saved if action != "end" else None, action, reason, mark)  # fmt: skip
        return Composed(sender, view, commit, state)

    def holds(self, view: View) -> bool:
        """Whether what its worker believes is so."""
        row = self.model.fenced(view.worker, view.session, view.epoch)
        return row is not None and row.cuts == int(view.cuts) and row.done == view.base

    def deliver_all(self, chosen: Sequence[Composed]) -> None:
        carried_out = set()
        for worker in dict.fromkeys(one.worker for one in chosen):
            part = [one for one in chosen if one.worker == worker]
            tried = {one.commit.session: self.trial_of(one.commit.session) for one in part}
            results = self.tables[worker].commit([one.commit for one in part])
            wanted = [self.model.commit(worker, one.commit) for one in part]
            assert results == wanted, [one.commit for one in part]
            for one, result in zip(part, results, strict=True):
                view, commit = one.view, one.commit
                if result in ("ok", "full"):
                    carried_out.add(commit.session)
                    if commit.answers:
                        view.before, view.base = view.base, commit.answers[-1].id
                    view.state, view.stale = one.state, bool(commit.action)
                elif result == "lost" and commit.epoch == view.epoch:
                    held = self.model.fenced(view.worker, view.session, view.epoch)
                    view.stale = held is None or held.cuts != int(view.cuts)
            # Of a failed one nothing is left but that it has ended a trial.
            carried_out |= {s for s, trial in tried.items() if trial != self.trial_of(s)}
            self.sent = [*self.sent, *part][-6:]
        self.untouched |= {one.commit.session for one in chosen} - carried_out

    def trial_of(self, session: str) -> int:
        row = self.model.slots[session].row
        return row.trial if row else 0

    def begin_trial(self, rng: Random) -> None:
        if self.views:
            held = [view for view in self.views if self.holds(view)]
            view = rng.choice(self.views + held * 3)
            sender = rng.choice([view.worker, view.worker, view.worker, *WORKERS])
            cuts = rng.choice([view.cuts, view.cuts, view.cuts, b"9"])
            self.begin_trial_now(view, sender, cuts)

    def begin_trial_now(self, view: View, sender: str, cuts: bytes) -> None:
        answer = self.tables[sender].begin_trial(view.session, view.epoch, cuts)
        assert answer == self.model.begin_trial(sender, view.session, view.epoch, cuts)

    def lease(self, rng: Random) -> None:
        gone = [worker for worker in WORKERS if worker not in self.model.leases]
        if gone and rng.random() < 0.8:
            self.have_lease(rng.choice(gone), True)
        else:
            self.have_lease(rng.choice(WORKERS), rng.random() < 0.5)

    def have_lease(self, worker: str, alive: bool) -> None:
        model = self.model
        if alive:
            self.call("SADD", KEYS.workers, worker)
            self.call("SET", KEYS.lease(worker), "here", "PX", 3_600_000)
            model.workers.add(worker)
            model.leases.add(worker)
        else:
            self.call("DEL", KEYS.lease(worker))
            model.leases.discard(worker)

    def take(self, rng: Random) -> None:
        """Take from the dead, or from an older process of one's name."""
        worker = self.anyone(rng)
        old = rng.choice([other for other in WORKERS if other != worker])
        why = "name" if (worker, old) == ("x.2", "x.1") and rng.random() < 0.7 else "dead"
        self.take_now(worker, old, why, rng.choice([3, 2, 1, 0]), rng.random() < 0.3)

    def hold_again(self, rng: Random) -> None:
        """A claim's answer was lost, or an entry was cancelled."""
        worker = self.anyone(rng)
        self.take_now(worker, worker, "self", rng.choice([3, 3, 1, 0]), rng.random() < 0.3)

    def leave(self, rng: Random) -> None:
        worker = rng.choice(WORKERS)
        if rng.random() < 0.5:
            self.have_lease(worker, False)
        self.take_now(worker, worker, "leave", 0, rng.random() < 0.3)

    def take_now(self, worker: str, old: str, why: str, room: int, guess: bool = False) -> None:
        table = self.tables[worker]
        sessions = sorted(table.owned(old)) if not guess else [s.encode() for s in SESSIONS]
        taken = table.take(sessions, old, why, room)
        wanted = self.model.take(worker, old, why, room, [raw.decode() for raw in sessions])
        assert ([row.session for row in taken.rows], taken.put_back, taken.closed,
                taken.set_aside) == wanted  # fmt: skip
        self.adopt(worker, taken.rows)

    def die(self, rng: Random) -> None:
        """A worker dies, of a suspect perhaps, whose producer may have cancelled what waited."""
        owners = [worker for worker in WORKERS if self.model.owned[worker]]
        old = rng.choice(owners or WORKERS)
        for view in [v for v in self.views if v.worker == old and not v.stale][:1]:
            if rng.random() < 0.6:
                self.begin_trial_now(view, old, view.cuts)
            if rng.random() < 0.2:
                for entry in list(self.model.slots[view.session].behind(view.base)):
                    self.cancel_now(view.session, entry)
        self.have_lease(old, False)
        worker = rng.choice([worker for worker in WORKERS if worker != old])
        self.have_lease(worker, rng.random() < 0.9)
        self.take_now(worker, old, "dead", rng.choice([3, 1, 0, 0]))
        self.have_lease(old, rng.random() < 0.7)

    # Operators, and Redis's own losses

    def retry(self, rng: Random) -> None:
        aside = sorted(self.model.aside)
        session = rng.choice(aside if aside and rng.random() < 0.8 else SESSIONS)
        kept = self.model.slots[session].aside
        epoch = str(kept[0].epoch) if kept and rng.random() < 0.8 else "1"
        what = rng.choice(["retry", "retry", "retry", "discard"])
        assert self.store.retry(session, epoch, what) == self.model.retry(session, epoch, what)

    def lose_row(self, rng: Random) -> None:
        session = rng.choice(SESSIONS)
        slot = self.model.slots[session]
        if slot.row and rng.random() < 0.5:
            self.call("DEL", KEYS.row(session))
            slot.row = None
            self.lost_rows.add(session)

    def forget(self, rng: Random) -> None:
        if not self.lost_rows:
            return
        session = rng.choice(sorted(self.lost_rows))
        last = self.model.slots[session].largest()
        last_ids = {session: EntryId(last.ms + rng.choice([0, 0, 0, 1, 3]), last.seq)}
        other = rng.choice(SESSIONS)
        if self.model.slots[other].row:
            last_ids[other] = ZERO  # has a row: nothing happens
        worker = rng.choice(WORKERS)
        assert self.tables[worker].forget(last_ids) == self.model.forget(last_ids)
        if not any(session in owned for owned in self.model.owned.values()):
            self.lost_rows.discard(session)

    # After every action

    def check(self) -> None:
        self.redis_holds_what_the_model_says()
        self.the_laws_hold()

    def redis_holds_what_the_model_says(self) -> None:
        now = read(self.store.line)
        wanted = self.model.expected()
        assert now == wanted, [
            (name, now.get(name), wanted.get(name))
            for name in {*now, *wanted}
            if now.get(name) != wanted.get(name)
        ]
        for session in self.untouched:
            for kind in KINDS:
                name = key(kind, session)
                assert now[name] == self.seen[name], f"a failed commit has changed {name}"
        if self.declares:
            allowed = self.store.declared | self.by_hand
            changed = {name for name in now if now[name] != self.seen[name]} & now["keys"]
            changed |= now["keys"] ^ self.seen["keys"]
            assert changed <= allowed, f"not declared: {changed - allowed}"
        self.untouched.clear()
        self.by_hand.clear()
        self.store.declared.clear()
        self.seen = now

    def the_laws_hold(self) -> None:
        """What must be true of Redis alone, whatever the model says."""
        now, rows = self.seen, {s: self.seen[key("slot", s)] for s in SESSIONS}
        live = {s for s in SESSIONS if rows[s] and rows[s]["status"] != "closed"}
        lost = self.lost_rows
        assert now["sessions"] - lost == live - lost
        waiting = {s for s in live if rows[s]["status"] == "waiting"}
        assert set(now["queue"]) - lost == waiting - lost
        for session in live - lost:
            row = rows[session]
            owners = [w for w in WORKERS if session in now[f"owned {w}"]]
            assert owners == ([row["owner"]] if row["owner"] else [])
            assert bool(row["owner"]) == (row["status"] != "waiting")
            assert EntryId.parse(row["cursor"]) <= EntryId.parse(row["done"])
            assert now[f"expire {session}"] == (False, False)
            held = self.model.slots[session].row
            assert held
            answered = [i for i, f in now[key("out", session)].items()
                        if "output" in f or "error" in f]  # fmt: skip
            assert answered == held.answered, "every entry one reply, in order"
        for session in set(SESSIONS) - live:
            out = now[key("out", session)]
            assert now[f"expire {session}"][0] == bool(rows[session])
            assert session in lost or now[f"expire {session}"][1] == bool(out)
        for session in now["aside"]:
            assert now[key("aside", session)]
            assert not now[key("aside", session)]["at"] or now[key("aside-in", session)]


@pytest.mark.parametrize("part", range(4))
def test_any_schedule_leaves_what_the_model_leaves(store: Store, part: int) -> None:
    for seed in range(part, SCHEDULES, 4):
        try:
            Schedule(store, seed).run(ACTIONS_EACH)
        except Exception as failure:
            failure.add_note(f"schedule {seed}")
            raise


# What random schedules do not reach


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


def replies(store: Store, session: str) -> list[tuple[EntryId, Fields]]:
    return list(stream(store.line.call("XRANGE", KEYS.outbox(session), "-", "+")).items())


def left(store: Store, session: str) -> list[EntryId]:
    return list(stream(store.line.call("XRANGE", KEYS.inbox(session), "-", "+")))


def status(store: Store, session: str) -> str:
    value = store.line.call("HGET", KEYS.row(session), "status")
    return (value or b"").decode()


SAVED = Checkpoint(b"state", "layout", "w1")
LARGE = [
    EntryId(5, TOP), EntryId(9, 9), EntryId(9, 99), EntryId(99, 0), EntryId(2**53, 2**53),
    EntryId(2**53 - 1, TOP), EntryId(TOP - 1, TOP), EntryId(TOP, 0), EntryId(TOP, TOP - 1),
]  # fmt: skip


@pytest.mark.parametrize("entry", LARGE, ids=str)
def test_a_checkpoint_trims_up_to_its_entry_and_no_further(store: Store, entry: EntryId) -> None:
    row = opened(store, "a")["a"]
    push(store, "a", EntryId(1), EntryId(1, 1), entry, entry.next())
    commit = Commit("a", row.epoch, row.cuts, ZERO,
                    tuple(map(answer, (EntryId(1), EntryId(1, 1), entry))), SAVED)  # fmt: skip
    assert store.table().commit([commit]) == ["ok"]
    assert left(store, "a") == [entry.next()]
    assert store.table().commit([commit]) == ["applied"]


@pytest.mark.parametrize("entry", LARGE, ids=str)
def test_a_last_reply_has_the_id_after_the_larger_one(store: Store, entry: EntryId) -> None:
    row = opened(store, "a")["a"]
    push(store, "a", EntryId(1), entry)
    commit = Commit("a", row.epoch, row.cuts, ZERO, (answer(EntryId(1)),), None, "end", "close")
    assert store.table().commit([commit]) == ["ok"]
    wanted = {"end": "1", "reason": "close", "cancelled": "1"}
    assert replies(store, "a")[1:] == [(EntryId(1), {"output": "y"}), (entry.next(), wanted)]
    assert store.line.call("HGET", KEYS.row("a"), "end").decode() == str(entry.next())


def test_the_largest_id_there_is_can_be_answered_checkpointed_and_ended(store: Store) -> None:
    last = EntryId(TOP, TOP)
    rows = opened(store, "a", "b", "c")
    for session in rows:
        push(store, session, EntryId(1), last)
    both = (answer(EntryId(1)), answer(last))
    table = store.table()
    assert table.commit([Commit(s, row.epoch, row.cuts, ZERO, both, *how)
                         for (s, row), how in zip(rows.items(), (
                             (SAVED,), (None, "end", "end"), (None, "end", "close")),
                             strict=True)]) == ["ok"] * 3  # fmt: skip
    assert left(store, "a") == []
    wanted = {"output": "y", "end": "1", "reason": "end", "cancelled": "0"}
    assert replies(store, "b")[-1] == (last, wanted)
    assert [status(store, session) for session in rows] == ["live", "closed", "closed"]
    assert store.line.call("EXISTS", KEYS.inbox("b"), KEYS.inbox("c")) == 0
    # A mark has no id left in `in`: the session closes all the same.
    store.line.call("XADD", KEYS.control, "*", "op", "close", "session", "a")
    ((entry, _),) = store.line.call("XRANGE", KEYS.control, "-", "+")
    assert table.apply_control([(entry, "a")]) == (1, 0)
    assert status(store, "a") in ("closing", "closed")


@pytest.mark.parametrize("part", ["ms", "seq"])
def test_ids_that_are_equal_as_doubles_are_told_apart(store: Store, part: str) -> None:
    row = opened(store, "a")["a"]
    low, high = (EntryId(2**53 + k) if part == "ms" else EntryId(7, 2**53 + k) for k in (0, 1))
    push(store, "a", low, high)
    table = store.table()
    first = Commit("a", row.epoch, row.cuts, ZERO, (answer(low),), SAVED)
    assert table.commit([first]) == ["ok"]
    assert left(store, "a") == [high]
    wrong = Commit("a", row.epoch, row.cuts, high, (answer(high.next()),))
    assert table.commit([wrong, first]) == ["lost", "applied"]
    line = store.lines[WORKERS[0]]
    assert line.script(CANCEL, [KEYS.row("a"), KEYS.inbox("a")], [str(low)]) == -1
    ends = Commit("a", row.epoch, row.cuts, low, (), None, "end", "close")
    assert table.commit([ends]) == ["ok"]
    assert replies(store, "a")[-1] == (
        high.next(), {"end": "1", "reason": "close", "cancelled": "1"}
    )  # fmt: skip


def test_control_is_applied_in_order_and_stops_at_an_older_head(store: Store) -> None:
    for op, session in (("open", "a"), ("close", "a"), ("open", "b"), ("open", "a")):
        store.line.call("XADD", KEYS.control, "*", "op", op, "session", session)
    heard = [(i, pairs(f)["session"]) for i, f in store.line.call("XRANGE", KEYS.control, "-", "+")]
    table = store.table()
    assert table.apply_control(heard[1:]) == (0, 0)
    assert store.line.call("XLEN", KEYS.control) == 4
    assert table.apply_control([*heard[:1], *heard[2:]]) == (1, 0)
    assert status(store, "a") == "waiting"
    assert status(store, "b") == ""
    assert table.apply_control(heard[:2]) == (1, 0)  # the first has been applied by another
    assert status(store, "a") == "closed"
    assert table.apply_control(heard) == (2, 0)
    assert status(store, "a") == status(store, "b") == "waiting"
    assert store.line.call("ZRANGE", KEYS.waiting, 0, -1) == [b"b", b"a"]
    assert table.apply_control(heard) == (0, 0)


@pytest.mark.parametrize(
    "fields",
    [
        ("op", "open"), ("session", "a"), ("op", "reopen", "session", "a"), ("x", "y"),
        ("op", "", "session", "a"), ("op", "open", "session", ""),
        ("op", "open", "session", "a" * 129), ("op", "open", "session", "a b"),
        ("op", "open", "session", "a\n"), ("op", "open", "session", "a\0"),
        ("op", "open", "session", "\u00e9"), ("op", "open", "session", b"\xe9"),
        ("op", "open", "session", "{a}"), ("op", "open", "session", "a", "token", "t" * 65),
        ("op", "open", "session", "a", "token", b"\xff" * 65),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("declares", [False, True])
def test_control_that_is_not_understood_is_deleted_and_counted(
    store: Store, fields: tuple[bytes | str, ...], declares: bool
) -> None:
    store.line.call("XADD", KEYS.control, "*", *fields)
    store.line.call("XADD", KEYS.control, "*", "op", "open", "session", "b")
    heard = [
        (i, dict(zip(f[::2], f[1::2], strict=True)).get(b"session", b"").decode("latin-1"))
        for i, f in store.line.call("XRANGE", KEYS.control, "-", "+")
    ]
    assert store.table(declares=declares).apply_control(heard) == (1, 1)
    assert store.line.call("XLEN", KEYS.control) == 0
    assert store.line.call("SMEMBERS", KEYS.sessions) == [b"b"]
    assert sorted(store.line.call("KEYS", "*slot:*")) == [KEYS.row("b").encode()]


def test_a_token_of_64_bytes_and_a_name_of_128_are_understood(store: Store) -> None:
    name, token = "aZ09._:/-" + "n" * 119, b"\xff" * 64
    for _ in range(2):
        entry = store.line.call(
            *("XADD", KEYS.control, "*", "op", "open", "session", name, "token", token)
        )
        assert store.table().apply_control([(entry, name)]) == (1, 0)
    assert store.line.call("HGET", KEYS.row(name), "token") == token
    assert [row.session for row in store.table().claim([name])] == [name]


HOW = {
    "answers": ((answer(EntryId(1)),), None, "", ""),
    "checkpoint": ((), SAVED, "", ""),
    "answers and checkpoint": ((answer(EntryId(1)),), SAVED, "", ""),
    "handback": ((), SAVED, "handback", ""),
    "end": ((answer(EntryId(1)),), None, "end", "end"),
    "close": ((answer(EntryId(1)),), None, "end", "close"),
    "idle": ((), None, "end", "idle"),
}  # fmt: skip


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("harm", ["in", "out", "out exhausted", "out ahead"])
@pytest.mark.parametrize("waits", ["", "wait"])
def test_a_session_whose_keys_are_spoilt_harms_no_other_of_the_commit(
    store: Store, how: str, harm: str, waits: str
) -> None:
    rows = opened(store, "a", "b", "c", replies=waits)
    push(store, "a", EntryId(1), EntryId(2))
    push(store, "c", EntryId(1), EntryId(2))
    if how != "idle":
        push(store, "b", EntryId(1), EntryId(2))
    spoilt = key(harm.split(maxsplit=1)[0], "b")
    if harm in ("in", "out"):
        store.line.call("SET", spoilt, "no stream")
    else:
        store.line.call("XADD", spoilt, f"{TOP}-{TOP}" if "ex" in harm else "9-0", "x", "y")
    good = HOW["answers and checkpoint"]
    commits = [
        Commit(s, rows[s].epoch, rows[s].cuts, ZERO, *(HOW[how] if s == "b" else good))
        for s in "abc"
    ]
    results = store.table().commit(commits)
    assert (results[0], results[2]) == ("ok", "ok")
    assert results[1] in ("ok", "refused")
    for session in "ac":
        assert left(store, session) == [EntryId(2)]
        assert [entry for entry, _ in replies(store, session)] == [OPENED, EntryId(1)]
    # And it can be ended, which is what a worker does then.
    if results[1] == "refused":
        assert (status(store, "b"), store.line.call("HGET", KEYS.row("b"), "done")) == (
            "live", b"0-0")  # fmt: skip
        row = rows["b"]
        ends = Commit("b", row.epoch, row.cuts, ZERO, (), None, "end", "reply_conflict")
        assert store.table().commit([ends]) == ["ok"]
        assert status(store, "b") == "closed"
        assert store.line.call("PTTL", KEYS.row("b")) > 0


@pytest.mark.parametrize("last", ["entry", "mark"])
def test_an_idle_end_that_comes_too_late_changes_nothing(store: Store, last: str) -> None:
    row = opened(store, "a")["a"]
    push(store, "a", EntryId(1))
    if last == "entry":
        push(store, "a", EntryId(2))
    else:
        tell(store, "a", "op", "close")
    before = store.line.call("HGETALL", KEYS.row("a")), replies(store, "a")
    for answers in ((), (answer(EntryId(1)),)):
        idle = Commit("a", row.epoch, row.cuts, ZERO, answers, None, "end", "idle")
        assert store.table().commit([idle]) == ["busy"]
        assert (store.line.call("HGETALL", KEYS.row("a")), replies(store, "a")) == before


def test_an_idle_end_may_bring_the_last_answers(store: Store) -> None:
    row = opened(store, "a")["a"]
    push(store, "a", EntryId(1), EntryId(2))
    both = (answer(EntryId(1)), answer(EntryId(2)))
    idle = Commit("a", row.epoch, row.cuts, ZERO, both, None, "end", "idle")
    assert store.table().commit([idle]) == ["ok"]
    wanted = {"end": "1", "reason": "idle", "cancelled": "0"}
    assert replies(store, "a")[-1] == (EntryId(2, 1), wanted)


def tell(store: Store, session: str, *fields: str) -> EntryId:
    """One more control entry for a session, applied; returns the last id of its `in`."""
    entry = store.line.call("XADD", KEYS.control, "*", "session", session, *fields)
    assert store.table().apply_control([(entry, session)]) == (1, 0)
    return left(store, session)[-1] if left(store, session) else ZERO


def suspicion(store: Store, session: str) -> tuple[int, int]:
    """The attempts and the trial that its row holds."""
    held = store.line.call("HMGET", KEYS.row(session), "attempts", "trial")
    return int(held[0]), int(held[1])


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


def test_a_session_set_aside_is_kept_whole_and_comes_back_as_it_was(store: Store) -> None:
    row = opened(store, "a")["a"]
    push(store, "a", *(EntryId(k) for k in range(1, 6)))
    table = store.table()
    first = Commit("a", row.epoch, row.cuts, ZERO, (answer(EntryId(1)),), SAVED)
    bad = Answer(EntryId(2), ("error", error("launch")), effect=False)
    second = Commit("a", row.epoch, row.cuts, EntryId(1), (bad,))
    assert table.commit([first]) + table.commit([second]) == ["ok", "ok"]
    before = dict(pairs(store.line.call("HGETALL", KEYS.row("a"))))
    taken = kill(store)
    assert (taken.rows, taken.put_back, taken.closed, taken.set_aside) == ([], 0, 0, 1)
    assert replies(store, "a")[-1] == (
        EntryId(3), {"error": "quarantined", "end": "1", "reason": "quarantined", "cancelled": "2"}
    )  # fmt: skip
    aside = pairs(store.line.call("HGETALL", key("aside", "a")))
    assert (aside.pop("at"), aside.pop("attempts")) == ("3-0", "1")
    assert abs(int(aside.pop("set_aside")) - time.time()) < 30
    before["trial"] = row.epoch.decode()
    assert aside == {name: value for name, value in before.items() if name != "attempts"}
    kept = store.line.call("XRANGE", key("aside-in", "a"), "-", "+")
    assert list(stream(kept)) == [EntryId(k) for k in range(2, 6)]
    assert store.line.call("SMEMBERS", KEYS.aside) == [b"a"]
    assert store.line.call("PTTL", key("aside", "a")) == -1
    # Entries meanwhile, or another epoch: it stays where it is.
    push(store, "a", EntryId(9))
    assert store.retry("a") == "busy"
    store.line.call("DEL", KEYS.inbox("a"))
    assert store.retry("a", 10**9) == store.retry("a", 10**9, "discard") == "gone"
    assert store.retry("b") == store.retry("b", what="discard") == "gone"
    opened(store, "b", "c")
    store.line.call("ZADD", KEYS.waiting, 4503599627370496 + 1, "new")
    assert store.retry("a") == "ok"
    assert suspicion(store, "a") == (0, 0)
    assert store.retry("a") == "gone"
    assert store.line.call("ZRANGE", KEYS.waiting, 0, -1) == [b"new", b"a"]
    (again,) = table.claim(["a"])
    assert (again.cursor, again.done, again.state, again.count, again.skipped, again.attempts) == (
        EntryId(1), EntryId(2), b"state", 1, {EntryId(2)}, 0)  # fmt: skip
    assert int(again.epoch) > int(row.epoch)
    assert left(store, "a") == [EntryId(k) for k in range(2, 6)]
    assert store.line.call("EXISTS", key("aside", "a"), key("aside-in", "a"), KEYS.aside) == 0
    assert pairs(store.line.call("HGETALL", KEYS.row("a"))).keys() == before.keys()
    assert replies(store, "a") == [(OPENED, {"op": "opened", "worker": WORKERS[0]})]
    assert store.line.call("PTTL", KEYS.outbox("a")) == store.line.call("PTTL", KEYS.row("a")) == -1


@pytest.mark.parametrize("what", ["retry", "discard"])
def test_what_is_set_aside_is_superseded_by_a_new_session_of_its_id(
    store: Store, what: str
) -> None:
    opened(store, "a")
    push(store, "a", EntryId(1))
    assert kill(store).set_aside == 1
    row = opened(store, "a")["a"]
    assert store.line.call("HGET", key("aside", "a"), "superseded") == b"1"
    assert store.retry("a") == "open"
    ends = Commit("a", row.epoch, row.cuts, ZERO, (), None, "end", "close")
    assert store.table().commit([ends]) == ["ok"]
    assert store.retry("a") == "superseded"
    if what == "discard":
        assert store.retry("a", what="discard") == "ok"
        assert store.line.call("EXISTS", key("aside", "a"), key("aside-in", "a"), KEYS.aside) == 0
        assert status(store, "a") == "closed"
    else:  # The next setting aside takes its place, and is not superseded.
        opened(store, "a")
        push(store, "a", EntryId(1))
        assert kill(store).set_aside == 1
        assert store.retry("a") == "ok"


@pytest.mark.parametrize("done", [0, 1])
def test_a_session_set_aside_with_nothing_unanswered_tells_its_reader(
    store: Store, done: int
) -> None:
    row = opened(store, "a")["a"]
    push(store, "a", EntryId(1), EntryId(2))
    if done:
        first = Commit("a", row.epoch, row.cuts, ZERO, (answer(EntryId(1)),))
        assert store.table().commit([first]) == ["ok"]
        assert store.lines[WORKERS[0]].script(
            CANCEL, [KEYS.row("a"), KEYS.inbox("a")], ["2-0"]) == 1  # fmt: skip
        assert kill(store).set_aside == 1  # it may have been run again
    else:
        assert kill(store, most=2, room=0).put_back == 1
        store.line.call("XDEL", KEYS.inbox("a"), "1-0", "2-0")
        assert store.table(max_attempts=1).claim(["a"]) == []
    # It answers no entry, so its id follows the larger of the last ids of `in` and `out`.
    assert replies(store, "a")[-1] == (
        EntryId(2, 1),
        {"error": "quarantined", "end": "1", "reason": "quarantined", "cancelled": "0"},
    )


def test_what_is_set_aside_has_no_entries_of_an_earlier_session_of_its_id(store: Store) -> None:
    opened(store, "a")
    push(store, "a", EntryId(1), EntryId(2))
    assert kill(store).set_aside == 1
    opened(store, "a")
    push(store, "a", EntryId(1))
    assert kill(store, most=2, room=0).put_back == 1
    store.line.call("DEL", KEYS.inbox("a"))
    assert store.table(max_attempts=1).claim(["a"]) == []
    assert store.line.call("SMEMBERS", KEYS.aside) == [b"a"]
    assert store.line.call("XLEN", key("aside-in", "a")) == 0
    assert store.retry("a") == "ok"
    assert left(store, "a") == []


def test_a_claim_sets_aside_what_has_had_its_attempts(store: Store) -> None:
    opened(store, "a", "b")
    push(store, "a", EntryId(1), EntryId(2))
    assert kill(store, most=2, room=0).put_back == 2
    assert store.line.call("ZRANGE", KEYS.waiting, 0, -1) == [b"a", b"b"]
    assert [row.session for row in store.table(max_attempts=1).claim(["a", "b"])] == ["b"]
    assert status(store, "a") == "closed"
    assert replies(store, "a")[-1] == (
        EntryId(1), {"error": "quarantined", "end": "1", "reason": "quarantined", "cancelled": "1"}
    )  # fmt: skip
    assert store.line.call("EXISTS", KEYS.waiting) == 0


def test_deaths_in_company_count_to_two_and_those_of_trials_in_full(store: Store) -> None:
    row = opened(store, "a")["a"]
    push(store, "a", EntryId(1), EntryId(2))
    counted = []
    for tried in (False, False, False, True, False, True):
        kill(store, most=9, tried=tried)
        counted.append(suspicion(store, "a"))
    assert counted == [(1, 0), (2, 0), (2, 0), (3, 0), (3, 0), (4, 0)]
    # An answer clears it, and one death sets nothing aside then.
    owner, epoch = store.line.call("HMGET", KEYS.row("a"), "owner", "epoch")
    commit = Commit("a", epoch, row.cuts, ZERO, (answer(EntryId(1)),), SAVED)
    assert store.table(owner.decode()).commit([commit]) == ["ok"]
    assert suspicion(store, "a") == (0, 0)
    assert len(kill(store, most=2, tried=False).rows) == 1
    # What has no entry after its checkpoint was not run, and is innocent.
    store.line.call("XTRIM", KEYS.inbox("a"), "MAXLEN", 0)
    for room in (5, 0):
        taken = kill(store, most=2, room=room)
        assert (len(taken.rows), taken.put_back) == ((1, 0) if room else (0, 1))
    assert suspicion(store, "a")[0] == 1


def test_entries_answered_but_not_checkpointed_may_have_been_run_again(store: Store) -> None:
    row = opened(store, "a")["a"]
    push(store, "a", EntryId(1))
    commit = Commit("a", row.epoch, row.cuts, ZERO, (answer(EntryId(1)),))
    assert store.table().commit([commit]) == ["ok"]
    kill(store, most=9, tried=False)
    assert suspicion(store, "a") == (1, 0)


def test_who_leaves_or_takes_its_own_again_counts_no_death(store: Store) -> None:
    opened(store, "a", "b")
    push(store, "a", EntryId(1))
    assert kill(store, most=2, tried=False).rows
    other = store.table(WORKERS[2], max_attempts=1)
    assert len(other.take([b"a", b"b"], WORKERS[2], "self", 5).rows) == 2
    assert other.take([b"a"], WORKERS[2], "self", 0).rows == []
    assert status(store, "a") == "live"
    store.lease()
    assert other.take([b"a", b"b"], WORKERS[2], "self", 5).rows == []
    tell(store, "b", "op", "close")
    assert status(store, "b") == "closing"
    taken = other.take([b"a", b"b"], WORKERS[2], "leave", 0)
    assert (taken.rows, taken.put_back, taken.closed, taken.set_aside) == ([], 1, 1, 0)
    assert (status(store, "a"), status(store, "b")) == ("waiting", "closed")
    assert suspicion(store, "a") == (1, 0)
    assert WORKERS[2] in store.table().workers()


def test_an_older_process_of_its_name_is_taken_from_whatever_its_lease(store: Store) -> None:
    opened(store, "a", "b")
    push(store, "a", EntryId(1))
    other = store.table(WORKERS[1])
    assert other.take([b"a", b"b"], WORKERS[0], "dead", 5).rows == []
    taken = other.take([b"a", b"b"], WORKERS[0], "name", 1)
    assert ([row.session for row in taken.rows], taken.put_back) == (["a"], 1)
    assert suspicion(store, "a") == (1, 0)
    assert suspicion(store, "b") == (0, 0)
    assert other.workers() == [WORKERS[1], WORKERS[2]]


def test_nothing_is_taken_from_who_has_a_lease(store: Store) -> None:
    opened(store, "a")
    push(store, "a", EntryId(1))
    tell(store, "a", "op", "close")
    before = read_all(store)
    other = store.table(WORKERS[2])
    taken = other.take([b"a"], WORKERS[0], "dead", 5)
    assert (taken.rows, taken.put_back, taken.closed, taken.set_aside) == ([], 0, 0, 0)
    assert read_all(store) == before


def test_who_has_no_lease_claims_and_takes_nothing(store: Store) -> None:
    opened(store, "a", "b")
    push(store, "a", EntryId(1))
    tell(store, "b", "op", "close")
    tell(store, "c", "op", "open")
    store.lease()
    before = read_all(store)
    other = store.table(WORKERS[2], max_attempts=1)
    assert other.claim(["c", "a", "nobody"]) == []
    for why in ("dead", "name"):
        taken = other.take([b"a", b"b"], WORKERS[0], why, 5)
        assert (taken.rows, taken.put_back, taken.closed, taken.set_aside) == ([], 0, 0, 0)
    assert store.table().take([b"a", b"b"], WORKERS[0], "self", 5).rows == []
    assert read_all(store) == before


def read_all(store: Store) -> dict[bytes, Any]:
    """Every key's value, as Redis would save it."""
    return {name: store.line.call("DUMP", name) for name in store.line.call("KEYS", "*")}


def test_nobody_but_the_owner_commits_or_tries(store: Store) -> None:
    row = opened(store, "a")["a"]
    push(store, "a", EntryId(1))
    other = store.table(WORKERS[2])
    assert store.table().begin_trial("a", row.epoch, row.cuts)
    before = read_all(store)
    wrong = str(int(row.epoch) + 1).encode()
    for how in HOW.values():
        commit = Commit("a", row.epoch, row.cuts, ZERO, *how)
        assert other.commit([commit]) == ["lost"]
        assert store.table().commit([Commit("a", wrong, row.cuts, ZERO, *how)]) == ["lost"]
    assert not other.begin_trial("a", row.epoch, row.cuts)
    assert not store.table().begin_trial("a", wrong, row.cuts)
    assert not store.table().begin_trial("b", row.epoch, row.cuts)
    assert read_all(store) == before
    assert other.take([b"a"], WORKERS[1], "name", 5).rows == []
    assert read_all(store)[KEYS.row("a").encode()] == before[KEYS.row("a").encode()]


def test_a_trial_ends_with_whatever_commit_its_owner_sends(store: Store) -> None:
    row = opened(store, "a")["a"]
    push(store, "a", EntryId(1), EntryId(2))
    table = store.table()
    first = Commit("a", row.epoch, row.cuts, ZERO, (answer(EntryId(1)),))
    for commit, result in (
        (Commit("a", row.epoch, b"7", ZERO, (answer(EntryId(1)),)), "lost"),
        (Commit("a", row.epoch, row.cuts, EntryId(1), ()), "lost"),
        (Commit("a", row.epoch, row.cuts, ZERO, (), None, "end", "idle"), "busy"),
        (first, "ok"),
        (first, "applied"),
        (Commit("a", row.epoch, row.cuts, EntryId(1), ()), "ok"),
    ):
        assert table.begin_trial("a", row.epoch, row.cuts)
        assert table.begin_trial("a", row.epoch, row.cuts)  # the answer of the first was lost
        assert suspicion(store, "a") == (0, int(row.epoch))
        assert table.commit([commit]) == [result]
        assert suspicion(store, "a") == (0, 0)
    assert not table.begin_trial("a", row.epoch, b"7")
    assert suspicion(store, "a") == (0, 0)


def test_a_trial_is_not_its_next_owners(store: Store) -> None:
    row = opened(store, "a")["a"]
    assert store.table().begin_trial("a", row.epoch, row.cuts)
    (again,) = store.table().take([b"a"], WORKERS[0], "self", 5).rows
    assert suspicion(store, "a") == (0, 0)
    assert not store.table().begin_trial("a", row.epoch, row.cuts)
    assert store.table().begin_trial("a", again.epoch, row.cuts)


@pytest.mark.parametrize("answered", [0, 1])
def test_cancelling_the_oldest_unanswered_entry_clears_its_session(
    store: Store, answered: int
) -> None:
    row = opened(store, "a")["a"]
    push(store, "a", *(EntryId(k) for k in range(1, 5)))
    done = EntryId(answered) if answered else ZERO
    if answered:
        commit = Commit("a", row.epoch, row.cuts, ZERO, (answer(done),))
        assert store.table().commit([commit]) == ["ok"]
    kill(store, most=9, tried=False)
    owner, epoch = store.line.call("HMGET", KEYS.row("a"), "owner", "epoch")
    assert store.table(owner.decode()).begin_trial("a", epoch, row.cuts)
    for entry, result in ((done, -1), (EntryId(4), 1), (EntryId(3), 1)):
        assert cancel(store, "a", entry) == result
        assert suspicion(store, "a") == (1, int(epoch))
    assert cancel(store, "a", EntryId(answered + 1)) == 1
    assert suspicion(store, "a") == (0, 0)
    assert not store.table(owner.decode()).begin_trial("a", epoch, row.cuts)


def cancel(store: Store, session: str, entry: EntryId) -> int:
    keys = [KEYS.row(session), KEYS.inbox(session)]
    return int(store.lines[WORKERS[0]].script(CANCEL, keys, [str(entry)]))


@pytest.mark.parametrize("how", ["handback", "leave", "dead", "self", "waits"])
def test_a_closing_session_that_its_owner_gives_up_is_closed(store: Store, how: str) -> None:
    row = opened(store, "a")["a"]
    push(store, "a", EntryId(1), EntryId(2))
    if how == "waits":
        assert kill(store, most=9, room=0).put_back == 1
    tell(store, "a", "op", "close")
    table = store.table()
    if how == "handback":
        commit = Commit("a", row.epoch, row.cuts, ZERO, (answer(EntryId(1)),), SAVED, "handback")
        assert table.commit([commit]) == ["ok"]
    elif how == "dead":
        taken = kill(store)
        assert (taken.rows, taken.closed, taken.set_aside) == ([], 1, 0)
    elif how != "waits":
        taken = table.take([b"a"], WORKERS[0], how, 5)
        assert (taken.rows, taken.closed) == ([], 1)
    assert status(store, "a") == "closed"
    behind = "1" if how == "handback" else "2"  # the mark is no entry that is cancelled
    assert replies(store, "a")[-1][1] == {"end": "1", "reason": "close", "cancelled": behind}
    assert store.line.call("EXISTS", KEYS.waiting, KEYS.sessions, KEYS.owned(WORKERS[0])) == 0


@pytest.mark.parametrize("reached", [False, True])
def test_a_close_mark_is_not_counted_as_cancelled(store: Store, reached: bool) -> None:
    row = opened(store, "a")["a"]
    push(store, "a", EntryId(1), EntryId(2))
    mark = tell(store, "a", "op", "close")
    push(store, "a", mark.next())
    ends = Commit("a", row.epoch, row.cuts, ZERO, (answer(EntryId(1)),), None, "end", "close",
                  str(mark) if reached else "")  # fmt: skip
    assert store.table().commit([ends]) == ["ok"]
    wanted = {"end": "1", "reason": "close", "cancelled": "2"}
    assert replies(store, "a")[-1] == (mark.next().next(), wanted)


def test_a_mark_after_a_lost_one_is_not_counted_either(store: Store) -> None:
    """After a failover the row may hold another mark than the one its owner has read."""
    row = opened(store, "a")["a"]
    push(store, "a", EntryId(1))
    first = store.line.call("XADD", KEYS.inbox("a"), "*", "op", "close").decode()
    tell(store, "a", "op", "close")
    ends = Commit("a", row.epoch, row.cuts, ZERO, (), None, "end", "close", first)
    assert store.table().commit([ends]) == ["ok"]
    assert replies(store, "a")[-1][1] == {"end": "1", "reason": "close", "cancelled": "1"}


@pytest.mark.parametrize("closed", [False, True])
def test_an_open_that_is_repeated_with_its_token_opens_nothing(store: Store, closed: bool) -> None:
    tell(store, "a", "op", "open", "token", "t")
    (row,) = store.table().claim(["a"])
    if closed:
        ends = Commit("a", row.epoch, row.cuts, ZERO, (), None, "end", "close")
        assert store.table().commit([ends]) == ["ok"]
    before = read_all(store)
    tell(store, "a", "op", "open", "token", "t")
    assert {**read_all(store), KEYS.control.encode(): b""} == {
        **before, KEYS.control.encode(): b""}  # fmt: skip
    for other in (("token", "u"), ()):
        tell(store, "a", "op", "open", *other)
        assert status(store, "a") == ("waiting" if closed else "live")
        if closed:
            (row,) = store.table().claim(["a"])
            ends = Commit("a", row.epoch, row.cuts, ZERO, (), None, "end", "close")
            assert store.table().commit([ends]) == ["ok"]


@pytest.mark.parametrize("how", ["handback", "leave", "dead"])
def test_a_session_put_back_waits_before_the_new(store: Store, how: str) -> None:
    row = opened(store, "a")["a"]
    for session in ("b", "c"):
        tell(store, session, "op", "open")
    if how == "handback":
        commit = Commit("a", row.epoch, row.cuts, ZERO, (), None, "handback")
        assert store.table().commit([commit]) == ["ok"]
    elif how == "leave":
        assert store.table().take([b"a"], WORKERS[0], "leave", 0).put_back == 1
    else:
        assert kill(store, most=9, room=0).put_back == 1
    assert store.line.call("ZRANGE", KEYS.waiting, 0, -1) == [b"a", b"b", b"c"]


def test_a_session_that_redis_lost_counts_only_what_has_no_reply(store: Store) -> None:
    row = opened(store, "a")["a"]
    push(store, "a", *(EntryId(k) for k in range(1, 6)))
    first = Commit("a", row.epoch, row.cuts, ZERO, (answer(EntryId(1)), answer(EntryId(2))))
    assert store.table().commit([first]) == ["ok"]
    entry = store.line.call("XADD", KEYS.control, "*", "op", "close", "session", "a")
    assert store.table().apply_control([(entry, "a")]) == (1, 0)
    mark = left(store, "a")[-1]
    store.line.call("DEL", KEYS.row("a"))
    assert store.table().forget({"a": EntryId(4), "b": ZERO}) == 2
    assert store.table().forget({"a": EntryId(4)}) == 0
    assert replies(store, "a")[-1] == (
        mark.next(), {"error": "forgotten", "end": "1", "reason": "forgotten", "cancelled": "3"}
    )  # fmt: skip
    assert all(store.line.call("PTTL", name) > 0 for name in (KEYS.row("a"), KEYS.outbox("a")))
    assert store.table().take([b"a"], WORKERS[0], "self", 5).rows == []
    assert store.table().owned() == set()


@pytest.mark.parametrize("declares", [False, True])
def test_128_sessions_with_states_are_one_call(store: Store, declares: bool, capsys: Any) -> None:
    sessions = [f"s{k}" for k in range(128)]
    rows = opened(store, *sessions, declares=declares)
    for session in sessions:
        push(store, session, EntryId(1))
    saved = Checkpoint(bytes(1024), "layout", "w")
    commits = [
        Commit(s, rows[s].epoch, rows[s].cuts, ZERO, (Answer(EntryId(1), ("output", bytes(64))),),
               saved) for s in sessions
    ]  # fmt: skip
    store.line.call("SLOWLOG", "RESET")
    store.line.call("CONFIG", "SET", "slowlog-log-slower-than", 0)
    assert store.table(declares=declares).commit(commits) == ["ok"] * 128
    took = [one[2] for one in store.line.call("SLOWLOG", "GET", 9) if one[3][0] in
            (b"EVALSHA", b"EVAL")]  # fmt: skip
    store.line.call("CONFIG", "SET", "slowlog-log-slower-than", 10_000)
    assert len(took) == 1
    with capsys.disabled():
        print(f"\n128 sessions, 1 KiB each, declares={declares}: Redis held for {took[0]} us")
