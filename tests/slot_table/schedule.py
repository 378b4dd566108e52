"""Random schedules of producers, workers and operators, each fixed by its seed.

Workers that lost a session keep acting on it, and commits are composed early, delivered late and
repeated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from slot_table.commits import Composed, answered, saved, spoilt
from slot_table.store import KEYS, SESSIONS, WORKERS, Store
from slot_table.world import World
from slotstream.ids import ZERO, EntryId

ACTIONS = {  # how often each is drawn
    "push": 7, "push_more": 3, "control": 6, "apply": 7, "cancel": 2, "delete_unread": 1,
    "delete_closed": 1, "claim": 8, "serve": 9, "commit": 15, "prepare": 3, "deliver": 3,
    "repeat": 4, "begin_trial": 4, "lease": 3, "take": 3, "die": 4, "leave": 1, "hold_again": 4,
    "retry": 3, "lose_row": 1, "forget": 4,
}  # fmt: skip


class Schedule:
    """A schedule that its seed fixes: it chooses, and its world carries out."""

    def __init__(self, store: Store, seed: int) -> None:
        """Start anew, with sessions in every state and with entries already."""
        self.rng = rng = Random(seed)
        declares = rng.random() < 0.5
        # As a rule the same for all; who allows less sets aside what another has put back.
        usual = rng.randint(1, 4)
        most = {worker: rng.choice([usual, usual, rng.randint(1, 4)]) for worker in WORKERS}
        self.notes: deque[str] = deque(maxlen=20)
        self.world = World(store, most, declares=declares, note=self.notes.append)
        self.model = self.world.model
        self.prepared: list[Composed] = []
        self.sent: list[Composed] = []
        for session in SESSIONS[rng.choice([0, 0, 0, 1]) :]:
            self.world.send(session, "open", rng.choice(["", "t"]), rng.choice(["", "wait"]))
            self.world.apply(WORKERS[0])
            if rng.random() < 0.8:
                self.world.claim(rng.choice(WORKERS), [session])
            for _ in range(rng.choice([0, 1, 2, 5])):
                self.world.push(session, "ok", "*")
            if rng.random() < 0.2:
                self.world.send(session, "close")
                self.world.apply(WORKERS[0])
                if rng.random() < 0.5:
                    self.world.push(session, "ok", "*")
        if rng.random() < 0.2:
            self.world.have_lease(rng.choice(WORKERS), False)
        self.world.check()

    def run(self, actions: int) -> None:
        names = self.rng.choices(list(ACTIONS), list(ACTIONS.values()), k=actions)
        for n, name in enumerate(names):
            try:
                getattr(self, name)(self.rng)
                self.world.check()
            except Exception as failure:
                failure.add_note(f"in action {n}, {name}; the last that was done:")
                failure.add_note("\n".join(self.notes))
                raise

    # Producers

    def push(self, rng: Random) -> None:
        kind = rng.choice([*["ok"] * 8, "bad", "bad", "end", "bad end"])
        how = rng.choice(["*", "*", "next", "again", "far", "sequence"])
        self.world.push(rng.choice(SESSIONS), kind, how)

    def push_more(self, rng: Random) -> None:
        session = rng.choice(SESSIONS)
        for how in ("*", "next", "*"):
            self.world.push(session, "ok", how)

    def control(self, rng: Random) -> None:
        session = rng.choice(SESSIONS)
        token = rng.choice(["", "t", "t", "u", "t" * 64, "t" * 65])
        slot = self.model.slots[session]
        kept = slot.row.token if slot.row else (slot.tomb or {}).get("token")
        if kept and rng.random() < 0.3:
            token = kept  # an `open` whose answer was lost is sent again
        op = rng.choice([*["open"] * (2 if slot.row else 7), "close", "close", "reset"])
        self.world.send(session, op, token, rng.choice(["", "", "wait"]))

    def cancel(self, rng: Random) -> None:
        session = rng.choice(SESSIONS)
        slot = self.model.slots[session]
        known = [*(slot.inbox.entries if slot.inbox else ()), EntryId(7, 7)]
        oldest = slot.unanswered()[:1] if slot.row else []
        self.world.cancel(session, rng.choice([rng.choice(known), *oldest]))

    def delete_unread(self, rng: Random) -> None:
        session = rng.choice(SESSIONS)
        if unread := self.world.unread(session, self.prepared):
            self.world.delete(session, rng.choice(unread))

    def delete_closed(self, rng: Random) -> None:
        self.world.use_again(rng.choice(SESSIONS))

    # Workers

    def apply(self, rng: Random) -> None:
        count = rng.choice([1, 2, 9])
        self.world.apply(rng.choice(WORKERS), count, rng.choice(["", "", "long ago", "later ones"]))

    def claim(self, rng: Random) -> None:
        line = self.world.store.line
        front = [raw.decode() for raw in line.call("ZRANGE", KEYS.waiting, 0, -1)]
        if rng.random() < 0.3:
            front = rng.sample(SESSIONS, len(SESSIONS))
        self.world.claim(self.anyone(rng), front[: rng.randint(1, 3)])

    def anyone(self, rng: Random) -> str:
        """A worker, and most often one that is alive."""
        return rng.choice([*WORKERS, *[w for w in WORKERS if w in self.model.leases] * 4])

    def serve(self, rng: Random) -> None:
        """A session that is not held, opened anew perhaps, gets an owner and entries."""
        world = self.world
        held = {view.session for view in world.views if world.holds(view)}
        session = rng.choice([s for s in SESSIONS if s not in held] or SESSIONS)
        if not self.model.slots[session].row:
            world.send(session, "open", rng.choice(["", "t", "u"]), rng.choice(["", "wait"]))
            world.apply(WORKERS[0])
        row = self.model.slots[session].row
        if row and row.owner:
            world.take(row.owner, row.owner, "self", 3)
        else:
            world.claim(self.anyone(rng), [session])
        for _ in range(rng.choice([0, 1, 2, 3])):
            world.push(session, "ok", "*")

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

    def deliver_all(self, chosen: Sequence[Composed]) -> None:
        self.sent = [*self.sent, *self.world.deliver(chosen)][-6:]

    def compose(self, rng: Random, worker: str = "") -> Composed | None:
        """A commit such as a worker makes; or one that is not as its session's row."""
        world = self.world
        views = [v for v in world.views if not worker or v.worker == worker]
        views += [v for v in views if world.holds(v)] * 6
        if not views:
            return None
        view = rng.choice(views)
        most, fail = rng.choice([1, 2, 3, 9, 0]), rng.choice([0, 0, 1, 2, 7])
        one = answered(world.model, view, most, fail)
        if not one.commit.action or rng.random() < 0.1:
            action, reason = rng.choice([
                ("", ""), ("", ""), ("", ""), ("", ""), ("", ""), ("handback", ""),
                ("handback", ""), ("end", "idle"), ("end", rng.choice(["close", "replay_gap"])),
            ])  # fmt: skip
            one = replace(one, commit=replace(one.commit, action=action, reason=reason))
        if rng.random() < 0.5:
            one = saved(one)
        wrong = rng.choice(["epoch", "owner", "cuts", "earlier", "before", "later"] + [""] * 14)
        return spoilt(one, wrong)

    def begin_trial(self, rng: Random) -> None:
        world = self.world
        if world.views:
            held = [view for view in world.views if world.holds(view)]
            view = rng.choice(world.views + held * 3)
            sender = rng.choice([view.worker, view.worker, view.worker, *WORKERS])
            cuts = rng.choice([view.cuts, view.cuts, view.cuts, b"9"])
            one = answered(self.model, view, 0, 0)
            commit = replace(one.commit, cuts=cuts)
            world.begin_trial(replace(one, worker=sender, commit=commit))

    def lease(self, rng: Random) -> None:
        gone = [worker for worker in WORKERS if worker not in self.model.leases]
        if gone and rng.random() < 0.8:
            self.world.have_lease(rng.choice(gone), True)
        else:
            self.world.have_lease(rng.choice(WORKERS), rng.random() < 0.5)

    def take(self, rng: Random) -> None:
        """Take from the dead, or from an older process of one's name."""
        worker = self.anyone(rng)
        old = rng.choice([other for other in WORKERS if other != worker])
        why = "name" if (worker, old) == ("x.2", "x.1") and rng.random() < 0.7 else "dead"
        self.world.take(worker, old, why, rng.choice([3, 2, 1, 0]), self.named(rng))

    def named(self, rng: Random) -> Sequence[str]:
        return SESSIONS if rng.random() < 0.3 else ()

    def hold_again(self, rng: Random) -> None:
        """A claim's answer was lost, or an entry was cancelled."""
        worker = self.anyone(rng)
        self.world.take(worker, worker, "self", rng.choice([3, 3, 1, 0]), self.named(rng))

    def leave(self, rng: Random) -> None:
        worker = rng.choice(WORKERS)
        if rng.random() < 0.5:
            self.world.have_lease(worker, False)
        self.world.take(worker, worker, "leave", 0, self.named(rng))

    def die(self, rng: Random) -> None:
        """A worker dies, of a suspect perhaps, whose producer may have cancelled what waited."""
        world = self.world
        owners = [worker for worker in WORKERS if self.model.owned[worker]]
        old = rng.choice(owners or WORKERS)
        for view in [v for v in world.views if v.worker == old and not v.stale][:1]:
            if rng.random() < 0.6:
                world.begin_trial(answered(self.model, view, 0, 0))
            if rng.random() < 0.2:
                for entry in list(self.model.slots[view.session].behind(view.base)):
                    world.cancel(view.session, entry)
        world.have_lease(old, False)
        worker = rng.choice([worker for worker in WORKERS if worker != old])
        world.have_lease(worker, rng.random() < 0.9)
        world.take(worker, old, "dead", rng.choice([3, 1, 0, 0]))
        world.have_lease(old, rng.random() < 0.7)

    # Operators, and Redis's own losses

    def retry(self, rng: Random) -> None:
        aside = sorted(self.model.aside)
        session = rng.choice(aside if aside and rng.random() < 0.8 else SESSIONS)
        kept = self.model.slots[session].aside
        epoch = str(kept[0].epoch) if kept and rng.random() < 0.8 else "1"
        self.world.retry(session, epoch, rng.choice(["retry", "retry", "retry", "discard"]))

    def lose_row(self, rng: Random) -> None:
        session = rng.choice(SESSIONS)
        if self.model.slots[session].row and rng.random() < 0.5:
            self.world.lose_row(session)

    def forget(self, rng: Random) -> None:
        if not self.world.lost_rows:
            return
        session = rng.choice(sorted(self.world.lost_rows))
        last = self.model.slots[session].largest()
        last_ids = {session: EntryId(last.ms + rng.choice([0, 0, 0, 1, 3]), last.seq)}
        other = rng.choice(SESSIONS)
        if self.model.slots[other].row:
            last_ids[other] = ZERO  # has a row: nothing happens
        self.world.forget(rng.choice(WORKERS), last_ids)
