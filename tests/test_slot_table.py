"""The slot table's scripts on a real Redis: any schedule of them, and every kind of commit."""

from __future__ import annotations

import os
from typing import Any

import pytest

from slot_table.schedule import Schedule
from slot_table.steps import (
    SAVED,
    answer,
    left,
    opened,
    push,
    read_all,
    replies,
    status,
    tell,
    usual,
)
from slot_table.store import KEYS, TOP, WORKERS, Store, key
from slotstream.ids import OPENED, ZERO, EntryId
from slotstream_worker.store.table import Checkpoint, Commit

SCHEDULES = int(os.environ.get("SLOT_TABLE_SCHEDULES", "72"))
ACTIONS_EACH = 150
USUALLY = Checkpoint(b"state", "layout", "")
"""Of the weights of `usual` outputs, and of the layout of the call."""


@pytest.mark.parametrize("part", range(4))
def test_any_schedule_leaves_what_the_model_leaves(store: Store, part: int) -> None:
    for seed in range(part, SCHEDULES, 4):
        try:
            Schedule(store, seed).run(ACTIONS_EACH)
        except Exception as failure:
            failure.add_note(f"schedule {seed}")
            raise


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
    assert store.cancel("a", low) == -1
    ends = Commit("a", row.epoch, row.cuts, low, (), None, "end", "close")
    assert table.commit([ends]) == ["ok"]
    assert replies(store, "a")[-1] == (
        high.next(), {"end": "1", "reason": "close", "cancelled": "1"}
    )  # fmt: skip


HOW = {
    "answers": ((answer(EntryId(1)),), None, "", ""),
    "outputs": ((usual(EntryId(1)),), None, "", ""),
    "checkpoint": ((), SAVED, "", ""),
    "usual checkpoint": ((), USUALLY, "", ""),
    "outputs and usual checkpoint": ((usual(EntryId(1)),), USUALLY, "", ""),
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
    results = store.table().commit(commits, layout=USUALLY.layout)
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


@pytest.mark.parametrize("declares", [False, True])
def test_128_sessions_with_states_are_one_call(store: Store, declares: bool, capsys: Any) -> None:
    sessions = [f"s{k}" for k in range(128)]
    rows = opened(store, *sessions, declares=declares)
    for session in sessions:
        push(store, session, EntryId(1))
    saved = Checkpoint(bytes(1024), "layout", "")
    commits = [
        Commit(s, rows[s].epoch, rows[s].cuts, ZERO, (usual(EntryId(1)),), saved) for s in sessions
    ]
    store.line.call("SLOWLOG", "RESET")
    store.line.call("CONFIG", "SET", "slowlog-log-slower-than", 0)
    table = store.table(declares=declares)
    assert table.commit(commits, layout="layout") == ["ok"] * 128
    took = [one[2] for one in store.line.call("SLOWLOG", "GET", 9) if one[3][0] in
            (b"EVALSHA", b"EVAL")]  # fmt: skip
    store.line.call("CONFIG", "SET", "slowlog-log-slower-than", 10_000)
    assert len(took) == 1
    with capsys.disabled():
        print(f"\n128 sessions, 1 KiB each, declares={declares}: Redis held for {took[0]} us")
