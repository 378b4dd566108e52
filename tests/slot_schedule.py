"""Random schedules of producers, workers and operators, each fixed by its seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import redis

from slot_model import Model, Stream, fold
from slot_store import (
    KEYS,
    KINDS,
    SESSIONS,
    WORKERS,
    Store,
    as_bytes,
    error,
    key,
    pairs,
    read,
)
from slotstream.ids import ZERO, EntryId
from slotstream.lines import Arg
from slotstream_worker.store.table import Answer, Checkpoint, Commit, Row


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
        assert self.store.cancel(session, entry) == self.model.cancel(session, entry)

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
