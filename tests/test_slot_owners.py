"""Who owns a session: leases, takeovers, hand-overs, and rows that Redis has lost."""

from __future__ import annotations

import pytest

from slot_table.steps import (
    answer,
    kill,
    left,
    opened,
    push,
    read_all,
    replies,
    status,
    suspicion,
    tell,
)
from slot_table.store import KEYS, WORKERS, Store
from slotstream.ids import ZERO, EntryId
from slotstream_worker.store.table import Commit, Position


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


def test_comparing_finds_what_differs_and_what_has_not_been_read(store: Store) -> None:
    rows = opened(store, *"abcdef")
    push(store, "b", EntryId(3))
    push(store, "c", EntryId(3))
    tell(store, "d", "op", "close")
    store.line.call("DEL", KEYS.row("e"))
    store.line.call("SET", KEYS.inbox("f"), "no stream")
    table = store.table()
    held = {s: Position(s, row.epoch, row.cuts, b"0-0", b"0-0") for s, row in rows.items()}
    held["b"] = held["b"]._replace(read_to=b"3-0")
    before = read_all(store)
    differ, unread = table.compare(list(held.values()))
    assert {s: fence and fence.status for s, fence in differ.items()} == {"d": "closing", "e": None}
    assert differ["d"] == table.fences(["d"])[0]
    assert sorted(unread) == ["c", "d"]  # the mark is an entry too
    wrong = [held["a"]._replace(epoch=b"99"), held["b"]._replace(done=b"1-0")]
    assert set(table.compare(wrong)[0]) == {"a", "b"}
    assert set(store.table(WORKERS[1]).compare([held["a"]])[0]) == {"a"}
    assert set(table.compare([held["a"]._replace(cuts=b"1")])[0]) == {"a"}
    assert read_all(store) == before
    assert table.count_owned() == 6
