"""Control messages: what opens a session, what closes it, what is not understood."""

from __future__ import annotations

import pytest

from slot_table.steps import SAVED, answer, kill, opened, push, read_all, replies, status, tell
from slot_table.store import KEYS, WORKERS, Store, pairs
from slotstream.ids import ZERO, EntryId
from slotstream_worker.store.table import Commit


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
