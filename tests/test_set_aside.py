"""Sessions whose owners die: suspicion, trials, setting aside, and the way back."""

from __future__ import annotations

import time
from typing import Any

import pytest

from slot_table.steps import (
    SAVED,
    answer,
    kill,
    left,
    opened,
    push,
    replies,
    status,
    suspicion,
    usual,
)
from slot_table.store import KEYS, WORKERS, Store, error, key, pairs, stream
from slotstream.ids import OPENED, ZERO, EntryId
from slotstream_worker.store.table import Answer, Commit


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
    assert pairs(store.line.call("HGETALL", KEYS.row("a"))).keys() == before.keys() - {"trial"}
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
        assert store.cancel("a", EntryId(2)) == 1
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


@pytest.mark.parametrize("answer", [answer, usual])
def test_a_trial_ends_with_whatever_commit_its_owner_sends(store: Store, answer: Any) -> None:
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
        assert store.cancel("a", entry) == result
        assert suspicion(store, "a") == (1, int(epoch))
    assert store.cancel("a", EntryId(answered + 1)) == 1
    assert suspicion(store, "a") == (0, 0)
    assert not store.table(owner.decode()).begin_trial("a", epoch, row.cuts)
