"""The slot table's scripts under rules that Hypothesis combines, and shortens where they fail.

The second driver of `slot_table.world`. What workers believe to hold, and the commits they have
made, are kept: any may be acted on at any later time, so that each becomes stale and comes late,
and comes again.

    SLOT_MACHINE_EXAMPLES=5000 pytest tests/test_slot_machine.py
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from slot_table.commits import Composed, View, answered, saved, spoilt
from slot_table.store import SESSIONS, WORKERS, Store
from slot_table.world import World
from slotstream.ids import EntryId

SETTINGS = settings(
    max_examples=int(os.environ.get("SLOT_MACHINE_EXAMPLES", "150")),
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    # Not `explain`: it takes as long as the shrinking, and says nothing of a sequence of rules.
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)

SESSION, WORKER = st.sampled_from(SESSIONS), st.sampled_from(WORKERS)
ROOM = st.sampled_from([3, 1, 0])
NTH = st.integers(0, 5)
TOKEN, REPLIES = st.sampled_from(["", "t", "u"]), st.sampled_from(["", "wait"])
WRONG = st.sampled_from(["", "", "", "epoch", "owner", "cuts", "earlier", "before", "later"])
KIND = st.sampled_from([*["ok"] * 4, *["bad"] * 3, "end", "bad end"])
HOW = st.sampled_from(["next", "next", "sequence", "sequence", "far"])


class Round(NamedTuple):
    """What a worker makes of the entries it has: `fail` has a bit for each answer."""

    most: int
    fail: int
    checkpoint: bool
    then: str


ROUND = st.builds(
    Round,
    most=st.sampled_from([1, 1, 2, 3, 0]),
    fail=st.sampled_from([0, 0, 1, 2, 7]),
    checkpoint=st.booleans(),
    then=st.sampled_from([*[""] * 8, "handback", "handback", "idle", "close"]),
)


class SlotTableMachine(RuleBasedStateMachine):
    """Three sessions, so that rules meet; three workers, two of them of one name."""

    views = Bundle("views")
    commits = Bundle("commits")

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.made: list[Composed] = []

    @initialize(
        target=views,
        most=st.sampled_from([1, 1, 2, 3]),
        least=st.sampled_from([1, 2, 3]),
        declares=st.booleans(),
        owners=st.tuples(*[st.sampled_from(["", *WORKERS])] * len(SESSIONS)),
        replies=REPLIES,
        how=HOW,
    )
    def begin(
        self, most: int, least: int, declares: bool, owners: tuple[str, ...], replies: str, how: str
    ) -> MultipleResults[View]:
        """Sessions are there already, most of them owned and with entries."""
        tries = {**dict.fromkeys(WORKERS, most), WORKERS[-1]: least}
        self.world = World(
            self.store, tries, declares=declares, note=lambda did: note(f"    {did}")
        )
        self.model = self.world.model
        views = []
        for session, owner in zip(SESSIONS, owners, strict=True):
            self.world.send(session, "open", "t", replies)
            self.world.apply(WORKERS[0])
            self.world.push(session, "ok", "next")
            self.world.push(session, "ok", how)
            self.world.push(session, "ok", how)
            if owner:
                views += self.world.claim(owner, [session])
        return multiple(*views)

    def held(self, session: str = "") -> list[View]:
        return [view for view in self.world.views
                if self.world.holds(view) and session in ("", view.session)]  # fmt: skip

    def entries(self) -> list[tuple[str, EntryId]]:
        return [(session, entry) for session, slot in self.model.slots.items() if slot.inbox
                for entry in slot.inbox.entries]  # fmt: skip

    def unread(self) -> list[tuple[str, EntryId]]:
        """What no commit answers that may still be carried out."""
        read = [one for one in self.made
                if self.model.fenced(one.worker, one.commit.session, one.commit.epoch)]  # fmt: skip
        return [(s, entry) for s in SESSIONS for entry in self.world.unread(s, read)]

    # Producers

    @rule(
        session=SESSION,
        kinds=st.lists(KIND, min_size=1, max_size=4),
        how=st.one_of(HOW, st.just("again")),
    )
    def push(self, session: str, kinds: list[str], how: str) -> None:
        for kind in kinds:
            self.world.push(session, kind, how)

    @rule(
        session=SESSION,
        op=st.sampled_from(["open", "close", ""]),
        token=TOKEN,
        replies=REPLIES,
        applied=st.sampled_from(["now", "now", "later", "from long ago", "but the first"]),
    )
    def control(self, session: str, op: str, token: str, replies: str, applied: str) -> None:
        if op:
            self.world.send(session, op, token, replies)
        if applied != "later":
            how = {"from long ago": "long ago", "but the first": "later ones"}.get(applied, "")
            self.world.apply(WORKERS[0], how=how)

    @precondition(lambda self: self.entries())
    @rule(nth=NTH, read=st.booleans())
    def take_out(self, nth: int, read: bool) -> None:
        """Cancel an entry, answered perhaps, or delete one that nobody has read."""
        entries = self.entries() if read else self.unread()
        if entries:
            act = self.world.cancel if read else self.world.delete
            act(*entries[nth % len(entries)])

    # Owners

    @precondition(lambda self: self.model.queue)
    @rule(target=views, worker=WORKER, sessions=st.lists(SESSION, min_size=1, unique=True))
    def claim(self, worker: str, sessions: list[str]) -> MultipleResults[View]:
        return multiple(*self.world.claim(worker, sessions))

    @rule(
        target=views,
        session=SESSION,
        worker=WORKER,
        anew=st.booleans(),
        entries=st.integers(0, 3),
        how=HOW,
        rounds=st.lists(ROUND, max_size=4),
    )
    def serve(
        self, session: str, worker: str, anew: bool, entries: int, how: str, rounds: list[Round]
    ) -> MultipleResults[View]:
        """A session is opened if it is not, gets an owner if it has none, entries and answers.

        Without this, too few rules find anything to act on. `anew`: what is left of an earlier
        session of this id is deleted before.
        """
        world, slot = self.world, self.model.slots[session]
        if not slot.row:
            if anew:
                world.use_again(session)
            world.send(session, "open")
            world.apply(WORKERS[0])
        for _ in range(entries):
            world.push(session, "ok", how)
        views = []
        if not self.held(session):
            owner = slot.row.owner if slot.row else ""
            world.have_lease(owner or worker, True)
            views = (world.take(owner, owner, "self", 1, [session]) if owner
                     else world.claim(worker, [session]))  # fmt: skip
        world.check()
        for view in self.held(session):
            self.answer(view, rounds)
        return multiple(*views)

    @precondition(lambda self: any(self.model.owned.values()))
    @rule(
        target=views,
        worker=WORKER,
        old=WORKER,
        why=st.sampled_from(["dead", "name"]),
        room=ROOM,
        named=st.sampled_from([(), SESSIONS, *((session,) for session in SESSIONS)]),
    )
    def take(
        self, worker: str, old: str, why: str, room: int, named: tuple[str, ...]
    ) -> MultipleResults[View]:
        """Whatever the lease of `old`; where it is the worker itself, its claim's answer was lost.

        `named`: these sessions, whoever owns them; or those that `old` owns.
        """
        why = "self" if worker == old else why
        return multiple(*self.world.take(worker, old, why, room, named))

    @precondition(lambda self: any(self.model.owned.values()))
    @rule(
        target=views,
        nth=NTH,
        tried=st.booleans(),
        then=st.sampled_from(["dead", "dead", "", "leave"]),
        by=WORKER,
        room=ROOM,
    )
    def end(self, nth: int, tried: bool, then: str, by: str, room: int) -> MultipleResults[View]:
        """An owner's lease ends, during the trial of a session perhaps.

        `then`: another takes what it owned; nothing yet; or it has given all back.
        """
        owners = [worker for worker in WORKERS if self.model.owned[worker]]
        old = owners[nth % len(owners)]
        if tried:
            for view in [view for view in self.held() if view.worker == old][:1]:
                self.world.begin_trial(answered(self.model, view, 0, 0))
        self.world.have_lease(old, False)
        if then == "leave":
            self.world.take(old, old, "leave", 0)
        if then != "dead":
            return multiple()
        self.world.have_lease(by, True)
        return multiple(*self.world.take(by, old, "self" if by == old else "dead", room))

    # Commits

    def make(self, view: View, how: Round, wrong: str = "") -> Composed:
        one = answered(self.model, view, how.most, how.fail)
        if how.then:
            action, reason = ("handback", "") if how.then == "handback" else ("end", how.then)
            one = replace(one, commit=replace(one.commit, action=action, reason=reason))
        one = spoilt(saved(one) if how.checkpoint else one, wrong)
        self.made.append(one)
        return one

    def answer(self, view: View, rounds: list[Round]) -> list[Composed]:
        made = []
        for how in rounds:
            made.append(self.make(view, how))
            self.world.deliver(made[-1:])
            self.world.check()
        return made

    @precondition(lambda self: self.held())
    @rule(
        target=commits,
        nth=NTH,
        rounds=st.lists(ROUND, min_size=1, max_size=4),
        twice=st.booleans(),
    )
    def go_on(self, nth: int, rounds: list[Round], twice: bool) -> MultipleResults[Composed]:
        """An owner commits round by round; the last once more, its answer cut off."""
        held = self.held()
        made = self.answer(held[nth % len(held)], rounds)
        if twice:
            self.world.deliver(made[-1:])
        return multiple(*made)

    @rule(target=commits, view=views, how=ROUND, wrong=WRONG, tries=st.booleans())
    def commit(self, view: View, how: Round, wrong: str, tries: bool) -> Composed:
        """Somebody commits who has been an owner once, and may be wrong in other ways.

        `tries`: says that it runs the session alone, before it commits.
        """
        one = self.make(view, how, wrong)
        if tries:
            self.world.begin_trial(one)
            self.world.check()
        self.world.deliver([one])
        return one

    @precondition(lambda self: self.held())
    @rule(target=commits, nth=NTH, how=ROUND)
    def prepare(self, nth: int, how: Round) -> Composed:
        """An owner's commit is on its way."""
        held = self.held()
        return self.make(held[nth % len(held)], how)

    @precondition(lambda self: self.made)
    @rule(chosen=st.lists(commits, min_size=1, max_size=3))
    def deliver(self, chosen: list[Composed]) -> None:
        """Commits arrive, late or once more."""
        self.world.deliver(chosen)

    # Operators

    @precondition(lambda self: self.model.aside)
    @rule(
        nth=NTH,
        what=st.sampled_from(["retry", "retry", "discard"]),
        but=st.sampled_from(["", "", "", "another epoch", "an entry has come"]),
    )
    def retry(self, nth: int, what: str, but: str) -> None:
        session = sorted(self.model.aside)[nth % len(self.model.aside)]
        kept = self.model.slots[session].aside
        assert kept
        if but == "an entry has come":
            self.world.push(session, "ok", "next")
        self.world.retry(session, "1" if but == "another epoch" else str(kept[0].epoch), what)

    @invariant()
    def check(self) -> None:
        self.world.check()


@pytest.mark.timeout(600)  # a failure is shortened for up to five minutes
def test_rules_in_any_order_leave_what_the_model_leaves(store: Store) -> None:
    def machine() -> SlotTableMachine:
        return SlotTableMachine(store)

    run_state_machine_as_test(machine, settings=SETTINGS)
