"""What Redis must hold of a slot table, by the rules of WIRE.md: in memory, and in plain Python."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from slot_table.row import Held, Slot, Stream, fold
from slot_table.store import KEYS, KINDS, RETENTION, SESSIONS, WORKERS, Fields, as_bytes, key, pairs
from slotstream.ids import OPENED, ZERO, EntryId
from slotstream_worker.store.table import Answer, Commit


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
        slot.ends += 1
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
            slot.row.status, slot.row.owner = "waiting", ""
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
