"""Redis and the model side by side: whatever is done to one is done to both, then both compared.

Two drivers choose what is done: seeded schedules (`schedule`) and Hypothesis
(`test_slot_machine`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import redis

from slot_table.commits import LAYOUT, WEIGHTS, Composed, View, described
from slot_table.ledger import Ledger
from slot_table.model import Model
from slot_table.row import Stream, fold
from slot_table.store import KEYS, KINDS, WORKERS, Store, as_bytes, key, pairs, read
from slotstream.arguments import Arg
from slotstream.ids import ZERO, EntryId
from slotstream_worker.store.table import Row


class World:
    """A real slot table and the model of it, and the workers that act on them.

    Args:
        store: the Redis; emptied.
        most: each worker's `max_attempts`.
        declares: whether the scripts are given all keys, as on a cluster.
        note: is told each action and what came of it, in a line.
    """

    def __init__(
        self,
        store: Store,
        most: dict[str, int],
        *,
        declares: bool,
        note: Callable[[str], Any] = lambda _: None,
    ) -> None:
        store.line.call("FLUSHALL")
        store.declared.clear()
        self.store, self.declares, self.note = store, declares, note
        self.model = Model(most)
        self.ledger = Ledger()
        self.tables = {
            worker: store.table(worker, max_attempts=most[worker], declares=declares)
            for worker in WORKERS
        }
        self.views: list[View] = []
        self.heard: list[tuple[bytes, str]] = []
        self.untouched: set[str] = set()
        self.by_hand: set[str] = set()
        self.lost_rows: set[str] = set()
        self.calls = 0
        self.seen = read(store.line)
        for worker in WORKERS:
            self.have_lease(worker, True)

    def call(self, *command: Arg) -> Any:
        """A command of a producer or an operator, not of a script."""
        self.by_hand.update(map(str, command[1:]))
        return self.store.line.call(*command)

    # Producers

    def push(self, session: str, kind: str, how: str) -> None:
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
        self.note(f"push {session} {entry} {kind}")
        slot.inbox = slot.inbox or Stream()
        slot.inbox.add(entry, fields)
        self.ledger.push(session, slot.ends, entry)

    def send(self, session: str, op: str, token: str = "", replies: str = "") -> None:
        """A control message."""
        fields = {"op": op, "session": session, "token": token, "replies": replies}
        flat = [part for name, value in fields.items() if value for part in (name, value)]
        entry = self.call("XADD", KEYS.control, "*", *flat)
        self.note(f"control {' '.join(flat)}")
        self.model.control = self.model.control or Stream()
        self.model.control.add(EntryId.parse(entry), pairs([as_bytes(part) for part in flat]))

    def cancel(self, session: str, entry: EntryId) -> None:
        answer = self.store.cancel(session, entry)
        self.note(f"cancel {session} {entry}: {answer}")
        assert answer == self.model.cancel(session, entry)
        if answer == 1:
            self.ledger.withdraw(session, self.model.slots[session].ends, entry)

    def unread(self, session: str, composed: Sequence[Composed]) -> list[EntryId]:
        """Entries that no worker has read: those that a raw `XDEL` may take out."""
        slot = self.model.slots[session]
        reading = {a.id for one in composed if one.commit.session == session
                   for a in one.commit.answers}  # fmt: skip
        return [i for i, fields in slot.behind(slot.row.done if slot.row else ZERO).items()
                if i not in reading and "op" not in fields]  # fmt: skip

    def delete(self, session: str, entry: EntryId) -> None:
        slot = self.model.slots[session]
        assert slot.inbox
        self.note(f"delete {session} {entry}")
        del slot.inbox.entries[entry]
        assert self.call("XDEL", KEYS.inbox(session), str(entry)) == 1
        self.ledger.withdraw(session, slot.ends, entry)

    def use_again(self, session: str) -> None:
        """What precedes another session of this id, once the last has ended."""
        slot = self.model.slots[session]
        if not slot.row and session not in self.lost_rows:
            self.note(f"delete what is left of {session}")
            self.call("DEL", KEYS.inbox(session), KEYS.outbox(session))
            self.ledger.withdraw(session, slot.ends, *(slot.inbox.entries if slot.inbox else ()))
            slot.inbox = slot.out = None
            slot.out_expires = False

    # Owners

    def apply(self, worker: str, count: int = 9, how: str = "") -> None:
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
        self.note(f"{worker} applies control: {answer}")
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

    def claim(self, worker: str, sessions: Sequence[str]) -> list[View]:
        rows = self.tables[worker].claim(sessions)
        claimed = [row.session for row in rows]
        self.note(f"{worker} claims {' '.join(sessions)}: {claimed}")
        assert claimed == self.model.claim(worker, sessions)
        return self._adopt(worker, rows)

    def take(
        self, worker: str, old: str, why: str, room: int, named: Sequence[str] = ()
    ) -> list[View]:
        """`named`: the sessions, whoever owns them; by default those that `old` owns."""
        table = self.tables[worker]
        sessions = [s.encode() for s in named] or sorted(table.owned(old))
        taken = table.take(sessions, old, why, room)
        found = [r.session for r in taken.rows], taken.put_back, taken.closed, taken.set_aside
        self.note(f"{worker} takes from {old} ({why}, room for {room}): {found[0]}, put back "
                  f"{found[1]}, closed {found[2]}, set aside {found[3]}")  # fmt: skip
        assert found == self.model.take(worker, old, why, room, [s.decode() for s in sessions])
        return self._adopt(worker, taken.rows)

    def _adopt(self, worker: str, rows: Sequence[Row]) -> list[View]:
        """Go on from the rows, as recovery does, and come to the state of uninterrupted runs."""
        views = []
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
            views.append(View(worker, row.session, row.epoch, row.cuts, row.done, state))
        known = [*self.views, *views]
        lost = [view for view in known if not self.holds(view)]
        self.views = [view for view in known if self.holds(view)] + lost[-4:]
        return views

    def holds(self, view: View) -> bool:
        """Whether what its worker believes is so."""
        row = self.model.fenced(view.worker, view.session, view.epoch)
        return row is not None and row.cuts == int(view.cuts) and row.done == view.base

    def begin_trial(self, one: Composed) -> None:
        """Say that a session is about to run alone, in the words of a commit of it."""
        sender, commit = one.worker, one.commit
        fence = (commit.session, commit.epoch, commit.cuts)
        answer = self.tables[sender].begin_trial(*fence)
        self.note(f"{sender} tries {commit.session} alone, epoch {commit.epoch.decode()}: {answer}")
        assert answer == self.model.begin_trial(sender, *fence)

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
        self.note(f"{worker} has {'a' if alive else 'no'} lease")

    # Commits

    def deliver(self, chosen: Sequence[Composed]) -> list[Composed]:
        """Send commits, those of one worker in one call; returns them as they were sent."""
        carried_out, sent = set(), []
        for worker in dict.fromkeys(one.worker for one in chosen):
            part = [one for one in chosen if one.worker == worker]
            tried = {one.commit.session: self._trial_of(one.commit.session) for one in part}
            # Every third call takes the long way for what is usual, too: both must say the same.
            self.calls += 1
            weights = WEIGHTS if self.calls % 3 else "others"
            results = self.tables[worker].commit(
                [one.commit for one in part], weights=weights, layout=LAYOUT
            )
            for one, result in zip(part, results, strict=True):
                self.note(f"{worker} commits {described(one.commit)}: {result}")
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
            carried_out |= {s for s, trial in tried.items() if trial != self._trial_of(s)}
            sent += part
        self.untouched |= {one.commit.session for one in chosen} - carried_out
        return sent

    def _trial_of(self, session: str) -> int:
        row = self.model.slots[session].row
        return row.trial if row else 0

    # Operators, and Redis's own losses

    def retry(self, session: str, epoch: str, what: str) -> None:
        answer = self.store.retry(session, epoch, what)
        self.note(f"{what} {session} that was set aside: {answer}")
        assert answer == self.model.retry(session, epoch, what)
        slot = self.model.slots[session]
        if (what, answer) == ("retry", "ok") and slot.row:
            self.ledger.come_back(session, slot.ends, slot.row.done, slot.behind(ZERO))

    def lose_row(self, session: str) -> None:
        slot = self.model.slots[session]
        self.note(f"the row of {session} is lost")
        self.call("DEL", KEYS.row(session))
        slot.row = None
        self.ledger.lose(session, slot.ends)
        self.lost_rows.add(session)

    def forget(self, worker: str, last_ids: dict[str, EntryId]) -> None:
        answer = self.tables[worker].forget(last_ids)
        self.note(f"{worker} forgets {' '.join(last_ids)}: {answer}")
        assert answer == self.model.forget(last_ids)
        # Until who owned it has seen that it does no more.
        owned = set().union(*self.model.owned.values())
        self.lost_rows -= last_ids.keys() - owned

    # After every action

    def check(self) -> None:
        self.redis_holds_what_the_model_says()
        ends = {session: slot.ends for session, slot in self.model.slots.items()}
        self.ledger.check(self.seen, ends, self.lost_rows)

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
