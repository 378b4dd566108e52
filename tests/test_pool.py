"""Rows of state: who holds which, what a launch may write, and that nothing leaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slotstream_worker.engine import pool as pool_module
from slotstream_worker.engine.errors import PoolFull, StalePlan
from slotstream_worker.engine.pool import Plan, Pool
from slotstream_worker.engine.state import Leaf, StateSpec

# A leaf of every kind that a row can hold: [B, ...], [steps, B, ...] and [a, b, B] among them.
LEAVES = {
    "armed": Leaf("['armed']", (3,), np.dtype(np.bool_), 0),
    "bytes": Leaf("['bytes']", (2, 2), np.dtype(np.int8), 0),
    "complex": Leaf("['complex']", (4,), np.dtype(np.complex64), 0),
    "count": Leaf("['count']", (), np.dtype(np.int32), 0),
    "empty": Leaf("['empty']", (0, 3), np.dtype(np.float32), 0),
    "half": Leaf("['half']", (5,), np.dtype(ml_dtypes.bfloat16), 0),
    "late": Leaf("['late']", (2, 3), np.dtype(np.float32), 2),
    "line": Leaf("['line']", (4, 2), np.dtype(np.float32), 1),
    "narrow": Leaf("['narrow']", (1,), np.dtype(np.float16), 0),
}
TREE = jax.tree.structure(dict.fromkeys(LEAVES, 0))
SPEC = StateSpec(tuple(LEAVES.values()), TREE)
SMALL = StateSpec(
    (LEAVES["armed"], LEAVES["count"], LEAVES["line"]),
    jax.tree.structure({"armed": 0, "count": 0, "line": 0}),
)


def random_rows(spec: StateSpec, count: int, seed: int) -> list[np.ndarray[Any, Any]]:
    """Rows `[count, ...]` a leaf, none of them zero, with NaN, infinities and -0.0 among them."""
    rng = np.random.default_rng(seed)
    rows = []
    for leaf in spec.leaves:
        shape = (count, *leaf.shape)
        if leaf.dtype == np.bool_:
            array = rng.random(shape) < 0.5
        elif np.issubdtype(leaf.dtype, np.integer):
            array = rng.integers(1, 100, shape).astype(leaf.dtype)
        else:
            values = rng.normal(size=shape) + 3.0
            odd = rng.choice([np.nan, np.inf, -np.inf, -0.0, 1e-3], shape)
            values = np.where(rng.random(shape) < 0.2, odd, values)
            array = values.astype(leaf.dtype)
        rows.append(np.asarray(array))
    return rows


def packed(spec: StateSpec, count: int, seed: int) -> list[bytes]:
    return spec.pack(random_rows(spec, count, seed), count)


def on_device(pool: Pool) -> list[bytes]:
    """Bytes of every slot's row, read from the arrays and not through the pool."""
    arrays = [np.asarray(array) for array in pool.arrays]
    return [
        b"".join(np.ascontiguousarray(array[k]).tobytes() for array in arrays)
        for k in range(pool.slots)
    ]


def row_of(pool: Pool, session: Any) -> bytes:
    return on_device(pool)[pool.sessions[session]]


def run(pool: Pool, sessions: list[Any], seed: int, rows: int | None = None) -> dict[Any, bytes]:
    """Plan and commit random rows; returns what each session's row now is."""
    plan = pool.plan(sessions, rows=rows)
    new = random_rows(pool.spec, len(plan.slot_indices), seed)
    pool.commit([(plan, list(map(jnp.asarray, new)))])
    return dict(zip(sessions, pool.spec.pack(new, len(plan.slot_indices)), strict=False))


def nothing(pool: Pool) -> bytes:
    return bytes(pool.slot_bytes)


# Slots


def test_a_pool_starts_empty_and_at_rest_and_says_what_a_slot_takes() -> None:
    pool = Pool(SPEC, 3)
    assert (pool.free, len(pool), dict(pool.sessions), pool.fresh) == (3, 0, {}, set())
    assert pool.slot_bytes == 3 + 4 + 32 + 4 + 0 + 10 + 24 + 32 + 2
    assert on_device(pool) == [nothing(pool)] * 3
    assert [array.shape[0] for array in pool.arrays] == [4] * len(LEAVES)
    with pytest.raises(ValueError, match="at least one slot, got 0"):
        Pool(SPEC, 0)


def test_admission_gives_every_session_and_fork_target_a_slot_or_says_what_is_short() -> None:
    pool = Pool(SMALL, 4)
    pool.admit(["earlier"])
    first = pool.admit(["a"], forks=["b"])
    assert first
    assert first.taken == ("a", "b")
    before = dict(pool.sessions)
    short = pool.admit(["c", "d"], forks=["e"])
    assert not short
    assert (short.short, short.taken) == (2, ())
    assert dict(pool.sessions) == before, "a refused admission takes nothing"
    assert pool.free == 1
    assert pool.admit(["c"])
    assert pool.free == 0
    assert len(set(pool.sessions.values())) == 4
    assert "c" in pool
    assert "d" not in pool
    assert len(pool) == 4


def test_admitting_a_session_twice_changes_nothing() -> None:
    pool = Pool(SMALL, 2)
    pool.admit(["a", "a"], forks=["a"])
    assert pool.free == 1
    rows = run(pool, ["a"], seed=1)
    slot, plan = pool.sessions["a"], pool.plan(["a"])
    again = pool.admit(["a", "b"])
    assert again.taken == ("b",)
    assert pool.admit(["a", "b"]), "both hold slots, so a full pool is no obstacle"
    pool.check(plan)
    assert pool.sessions["a"] == slot
    assert pool.has_state("a")
    assert row_of(pool, "a") == rows["a"]


def test_rolling_back_an_admission_gives_back_only_what_it_took() -> None:
    pool = Pool(SMALL, 4)
    pool.admit(["a", "b"])
    rows = run(pool, ["a", "b"], seed=2)
    admission = pool.admit(["b", "c"], forks=["a", "d"])
    assert admission.taken == ("c", "d")
    run(pool, ["c"], seed=3)
    pool.release(["d"])
    pool.rollback_admit(admission)
    assert set(pool.sessions) == {"a", "b"}
    assert pool.free == 2
    assert {s: row_of(pool, s) for s in "ab"} == rows
    assert on_device(pool).count(nothing(pool)) == 2
    pool.rollback_admit(pool.admit(["e", "f", "g"]))
    assert set(pool.sessions) == {"a", "b"}, "a refused admission has nothing to give back"


# Plans


def test_a_plan_addresses_rows_in_the_order_asked_and_pads_with_the_sink() -> None:
    pool = Pool(SMALL, 4)
    pool.admit(["a", "b", "c"])
    run(pool, ["b"], seed=1)
    plan = pool.plan(["c", "b"], rows=4)
    slots = pool.sessions
    assert plan.slot_indices.dtype == np.int32
    assert plan.slot_indices.tolist() == [slots["c"], slots["b"], pool.sink, pool.sink]
    assert pool.sink not in slots.values()
    assert plan.has_state.tolist() == [False, True, False, False]
    assert (plan.num_rows, plan.sessions) == (2, ("c", "b"))
    assert pool.plan(["a", "c", "b"]).slot_indices.tolist() == [slots[s] for s in "acb"]


def test_a_launch_takes_a_session_once_and_no_more_than_its_rows() -> None:
    pool = Pool(SMALL, 4)
    pool.admit(["a", "b", "c"])
    with pytest.raises(ValueError, match="each once"):
        pool.plan(["a", "b", "a"], rows=4)
    with pytest.raises(ValueError, match="a launch of 2 rows"):
        pool.plan(["a", "b", "c"], rows=2)
    with pytest.raises(KeyError, match="d"):
        pool.plan(["a", "d"])


def test_a_plan_staged_ahead_counts_on_the_rows_in_flight_and_is_dropped_without_a_trace() -> None:
    pool = Pool(SMALL, 4)
    pool.admit(["a", "b", "c"])
    first, second = pool.plan(["a"], rows=2), pool.plan(["b"], rows=1)
    staged = pool.plan(["c", "a", "b"], rows=4, ahead=[first, second])
    assert staged.has_state.tolist() == [False, True, True, False]
    assert pool.plan(["a", "b"]).has_state.tolist() == [False, False], "not without `ahead`"
    before = (dict(pool.sessions), pool.fresh, pool.free, on_device(pool))
    pool.check(staged)
    del staged
    assert (dict(pool.sessions), pool.fresh, pool.free, on_device(pool)) == before


def test_a_plan_staged_ahead_commits_after_the_round_in_flight() -> None:
    pool = Pool(SMALL, 4)
    pool.admit(["a", "b"])
    flight = pool.plan(["a"], rows=2)
    staged = pool.plan(["b", "a"], rows=2, ahead=[flight])
    first, second = (random_rows(SMALL, 2, seed) for seed in (1, 2))
    pool.commit([(flight, first)])
    assert row_of(pool, "a") == SMALL.pack(first, 2)[0]
    pool.check(staged)
    pool.commit([(staged, second)])
    assert [row_of(pool, s) for s in "ba"] == SMALL.pack(second, 2)


CHANGES: dict[str, Callable[[Pool], Any]] = {
    "released": lambda pool: pool.release(["a"]),
    "released and admitted again": lambda pool: (pool.release(["a"]), pool.admit(["a"])),
    "reset": lambda pool: pool.reset("a"),
    "forked onto": lambda pool: pool.fork("b", "a"),
    "written": lambda pool: pool.write({"a": packed(SMALL, 1, 99)[0]}),
    "put at rest": lambda pool: pool.write({"a": b""}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_is_stale_once_one_of_its_rows_was_changed_by_no_plan(change: str) -> None:
    pool = Pool(SMALL, 4)
    pool.admit(["a", "b", "c"])
    run(pool, ["a", "b"], seed=1)
    plan, other = pool.plan(["b", "a"]), pool.plan(["b", "c"])
    pool.check(plan)
    CHANGES[change](pool)
    with pytest.raises(StalePlan, match=r"'a'.*plan again"):
        pool.check(plan)
    pool.check(other)  # the rows it names are as they were


def test_a_plan_survives_commits_forks_from_its_rows_and_changes_to_other_rows() -> None:
    pool = Pool(SMALL, 5)
    pool.admit(["a", "b", "c"])
    plan = pool.plan(["a"])
    run(pool, ["a", "b"], seed=1)
    pool.fork("a", "d")
    pool.reset("b")
    pool.release(["c"])
    pool.write({"b": packed(SMALL, 1, 5)[0]})
    pool.read(["a"])
    pool.check(plan)


@pytest.mark.parametrize("change", CHANGES)
def test_a_row_changed_while_its_launch_ran_keeps_the_change(change: str) -> None:
    pool = Pool(SMALL, 4)
    pool.admit(["a", "b", "c"])
    run(pool, ["a", "b"], seed=1)
    plan = pool.plan(["c", "a"], rows=4)
    CHANGES[change](pool)
    changed, fresh = on_device(pool), pool.fresh
    new = random_rows(SMALL, 4, seed=7)
    pool.commit([(plan, new)])
    assert row_of(pool, "c") == SMALL.pack(new, 4)[0]
    slot = pool.sessions["c"]
    assert [row for k, row in enumerate(on_device(pool)) if k != slot] == [
        row for k, row in enumerate(changed) if k != slot
    ]
    assert pool.fresh == fresh - {slot}


def test_a_launch_that_outlives_its_session_writes_nothing_into_the_slots_next_holder() -> None:
    pool = Pool(SMALL, 1)
    pool.admit(["old"])
    plan = pool.plan(["old"], rows=2)
    pool.release(["old"])
    pool.admit(["next"])
    assert pool.sessions["next"] == plan.slot_indices[0], "it took over the same slot"
    pool.commit([(plan, random_rows(SMALL, 2, seed=1))])
    assert row_of(pool, "next") == nothing(pool)
    assert not pool.has_state("next")
    assert pool.read(["next"]) == [b""]


# Commit


def test_committed_rows_hold_state_and_every_other_row_is_untouched() -> None:
    pool = Pool(SPEC, 20)
    pool.admit("abcdef")
    old = run(pool, list("abcdef"), seed=1, rows=16)
    pool.reset("f")
    new: dict[str, bytes] = {}
    launches = []
    for sessions, rows, seed in ((["e", "a"], 2, 2), (["f"], 4, 3)):
        plan = pool.plan(sessions, rows=rows)
        values = random_rows(SPEC, rows, seed)
        launches.append((plan, values))
        new |= dict(zip(sessions, SPEC.pack(values, rows), strict=False))
    assert pool.fresh == {pool.sessions["f"]}
    pool.commit(launches)
    assert pool.fresh == set()
    for session in "abcdef":
        assert row_of(pool, session) == new.get(session, old[session])
    assert new.keys() == {"e", "a", "f"}


@pytest.mark.parametrize("seed", range(25))
def test_what_is_committed_is_there_for_whatever_comes_next_told_to_the_device_or_not(
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    prompt, late = Pool(SMALL, 6), Pool(SMALL, 6)
    for step in range(60):
        held = sorted(prompt.sessions)
        act = str(rng.choice(["admit", "run", "run", "run", "release", "reset", "fork", "write"]))
        some = [str(s) for s in rng.permutation(held)[: rng.integers(1, 4)]]
        other = f"s{rng.integers(8)}"
        seen, looks = [], rng.random() < 0.15
        for pool in (prompt, late):
            if act == "admit":
                pool.admit([other])
            elif act == "run" and some:
                plan = pool.plan(some, rows=4)
                if step % 7 == 0:  # what it was planned on has gone meanwhile
                    pool.reset(some[0])
                pool.commit([(plan, list(map(jnp.asarray, random_rows(SMALL, 4, seed=step))))])
            elif act == "release" and some:
                pool.release(some)
            elif act == "reset" and some:
                pool.reset(some[0])
            elif act == "fork" and some and (pool.free or other in pool):
                pool.fork(some[0], other)
            elif act == "write" and some:
                pool.write(dict(zip(some, packed(SMALL, len(some), seed=step), strict=True)))
            if pool is prompt:
                pool.settle()
            if looks:
                seen.append(pool.read(sorted(pool.sessions)))
        assert seen[:1] == seen[1:]
    assert (prompt.sessions, prompt.fresh) == (late.sessions, late.fresh)
    assert on_device(prompt) == on_device(late)
    held = sorted(late.sessions)
    assert prompt.read(held) == late.read(held)


def test_what_could_not_be_written_is_still_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(SMALL, 4)
    pool.admit("ab")
    expected = run(pool, ["a"], seed=1) | run(pool, ["b"], seed=2)
    scatter, failures = pool_module._scatter, ["full"]

    def full_once(*args: Any) -> Any:
        if failures:
            raise MemoryError(failures.pop())
        return scatter(*args)

    monkeypatch.setattr(pool_module, "_scatter", full_once)
    with pytest.raises(MemoryError):
        pool.read(["a", "b"])
    assert pool.read(["a", "b"]) == [expected["a"], expected["b"]]


def test_padding_reaches_no_session() -> None:
    pool = Pool(SMALL, 2)
    pool.admit(["a", "b"])
    run(pool, [], seed=1, rows=4)  # all padding: the sink now holds garbage
    assert on_device(pool) == [nothing(pool)] * 2
    assert pool.fresh == set(pool.sessions.values())
    pool.release(["a"])
    pool.admit(["c"])
    assert row_of(pool, "c") == nothing(pool)


# Fork, reset, release


def test_a_fork_is_a_copy_that_goes_its_own_way() -> None:
    pool = Pool(SPEC, 3)
    pool.admit(["a", "b"])
    rows = run(pool, ["a", "b"], seed=1)
    pool.fork("a", "c")
    assert row_of(pool, "c") == row_of(pool, "a") == rows["a"]
    assert pool.has_state("c")
    assert pool.sessions["c"] != pool.sessions["a"]
    after = run(pool, ["c"], seed=2)
    assert row_of(pool, "c") == after["c"] != rows["a"]
    assert row_of(pool, "a") == rows["a"]
    again = run(pool, ["a"], seed=3)
    pool.fork("a", "b")  # onto a session that holds state
    assert row_of(pool, "b") == again["a"]
    assert row_of(pool, "c") == after["c"]


def test_a_fork_of_a_session_at_rest_is_at_rest() -> None:
    pool = Pool(SMALL, 4)
    pool.admit(["a", "b"])
    run(pool, ["b"], seed=1)
    pool.fork("a", "b")
    pool.fork("a", "c")
    assert pool.fresh == {0, 1, 2}
    assert on_device(pool) == [nothing(pool)] * 4
    assert pool.read(["b", "c"]) == [b"", b""]


def test_a_fork_into_a_full_pool_is_refused_and_changes_nothing() -> None:
    pool = Pool(SMALL, 2)
    pool.admit(["a", "b"])
    run(pool, ["a", "b"], seed=1)
    before, plan = on_device(pool), pool.plan(["a", "b"])
    with pytest.raises(PoolFull, match=r"all 2 slots hold sessions; none is free for 'c'"):
        pool.fork("a", "c")
    assert on_device(pool) == before
    assert set(pool.sessions) == {"a", "b"}
    pool.check(plan)


def test_reset_zeroes_the_row_on_the_device_and_keeps_the_slot() -> None:
    pool = Pool(SPEC, 3)
    pool.admit(["a", "b", "c"])
    rows = run(pool, ["a", "b", "c"], seed=1)
    slot = pool.sessions["b"]
    pool.reset("b")
    assert pool.sessions["b"] == slot
    assert row_of(pool, "b") == nothing(pool)
    assert pool.fresh == {slot}
    assert [row_of(pool, s) for s in "ac"] == [rows["a"], rows["c"]]
    with pytest.raises(KeyError):
        pool.reset("stranger")


@pytest.mark.parametrize("count", [1, 2, 17, 130])
def test_released_rows_are_zero_on_the_device_and_free(count: int) -> None:
    pool = Pool(SMALL, 132)
    sessions = list(range(132))
    pool.admit(sessions)
    rows = run(pool, sessions, seed=count)
    gone = [int(k) for k in np.random.default_rng(count).permutation(132)[:count]]
    slots = {pool.sessions[s] for s in gone}
    pool.release([*gone, gone[0], "stranger"])
    assert pool.free == count
    device = on_device(pool)
    assert all(device[slot] == nothing(pool) for slot in slots)
    assert all(device[slot] == rows[s] for s, slot in pool.sessions.items())
    assert not any(s in pool for s in gone)


# Rows in and out


@pytest.mark.parametrize("count", [1, 2, 16, 17, 128, 130, 150])
def test_rows_written_are_read_back_byte_for_byte_and_lie_in_their_own_slots(count: int) -> None:
    pool = Pool(SPEC, 150)
    sessions = [int(k) for k in np.random.default_rng(count).permutation(150)]
    pool.admit(sessions)
    raws = dict(zip(sessions[:count], packed(SPEC, count, seed=count), strict=True))
    pool.write(raws)
    assert pool.read(sessions[:count]) == list(raws.values())
    assert pool.read(sessions[count:]) == [b""] * (150 - count)
    device = on_device(pool)
    for session, slot in pool.sessions.items():
        assert device[slot] == raws.get(session, nothing(pool))
    assert len(pool.fresh) == 150 - count


@pytest.mark.parametrize("name", LEAVES)
def test_every_kind_of_leaf_keeps_its_values_through_bytes_and_the_device(name: str) -> None:
    leaf = LEAVES[name]
    spec = StateSpec((leaf,), jax.tree.structure({name: 0}))
    (values,) = random_rows(spec, 3, seed=5)
    raws = spec.pack([values], 3)
    assert raws == [np.ascontiguousarray(row).tobytes() for row in values]
    (back,) = spec.unpack(raws)
    assert (back.dtype, back.shape) == (leaf.dtype, (3, *leaf.shape))
    assert back.tobytes() == values.tobytes()
    pool = Pool(spec, 4)
    pool.admit(["x", "a", "b", "c"])
    plan = pool.plan(["a", "b", "c"])
    pool.commit([(plan, [jnp.asarray(values)])])
    assert pool.read(["a", "b", "c"]) == raws
    pool.write({"x": raws[1]})
    view = np.asarray(pool.view(leaf.path))
    assert (view.dtype, view.shape) == (leaf.dtype, (5, *leaf.shape))
    assert view[pool.sessions["x"]].tobytes() == values[1].tobytes()


def test_a_row_is_its_leaves_in_tree_order_without_gaps() -> None:
    rows = random_rows(SPEC, 2, seed=3)
    raws = SPEC.pack(rows, 2)
    for k, raw in enumerate(raws):
        assert raw == b"".join(np.ascontiguousarray(array[k]).tobytes() for array in rows)
    assert SPEC.row_bytes == len(raws[0])


def test_a_models_own_tree_has_its_batch_axes_where_the_model_has_them() -> None:
    rows = [jnp.asarray(array) for array in random_rows(SPEC, 7, seed=4)]
    tree = SPEC.to_model(rows)
    assert tree["line"].shape == (4, 7, 2)
    assert tree["late"].shape == (2, 3, 7)
    assert tree["armed"].shape == (7, 3)
    assert tree["count"].shape == (7,)
    back = SPEC.from_model(tree)
    assert [np.asarray(a).tobytes() for a in back] == [np.asarray(a).tobytes() for a in rows]
    np.testing.assert_array_equal(tree["late"][:, :, 5], rows[6][5])
    with pytest.raises(ValueError, match="structure"):
        SPEC.from_model({"armed": tree["armed"]})


@pytest.mark.parametrize("wrong", [-1, 1, 8], ids=["a byte short", "a byte over", "eight over"])
def test_bytes_of_another_length_are_refused_and_nothing_is_written(wrong: int) -> None:
    pool = Pool(SPEC, 3)
    pool.admit(["a", "b", "c"])
    run(pool, ["a"], seed=1)
    before, fresh, plan = on_device(pool), pool.fresh, pool.plan(["a", "b", "c"])
    good = packed(SPEC, 1, seed=2)[0]
    bad = good[:wrong] if wrong < 0 else good + bytes(wrong)
    with pytest.raises(ValueError, match=f"takes {SPEC.row_bytes} bytes, got {len(bad)}"):
        pool.write({"b": good, "c": bad, "a": b""})
    assert on_device(pool) == before
    assert pool.fresh == fresh
    pool.check(plan)


def test_rows_of_no_bytes_put_sessions_at_rest() -> None:
    pool = Pool(SMALL, 4)
    pool.admit(["a", "b", "c"])
    rows = run(pool, ["a", "b", "c"], seed=1)
    other = packed(SMALL, 1, seed=9)[0]
    pool.write({"a": b"", "b": other})
    assert pool.read(["a", "b", "c"]) == [b"", other, rows["c"]]
    assert row_of(pool, "a") == nothing(pool)
    assert pool.fresh == {pool.sessions["a"]}
    pool.write({})
    assert pool.read(["c", "b"]) == [rows["c"], other]
    assert pool.read([]) == []


def test_a_read_begun_before_a_commit_gives_the_rows_of_then() -> None:
    pool = Pool(SPEC, 20)
    sessions = list(range(20))
    pool.admit(sessions)
    old = run(pool, sessions[:19], seed=1)
    reading = pool.start_read(sessions)
    new = run(pool, sessions, seed=2)
    pool.release([3])
    assert pool.fetch(reading) == [*old.values(), b""]
    assert pool.read([2, 19]) == [new[2], new[19]]


def test_the_state_is_readable_whole_and_leaf_by_leaf() -> None:
    pool = Pool(SPEC, 4)
    pool.admit(["a", "b"])
    run(pool, ["b"], seed=1)
    state = pool.state
    assert state.keys() == LEAVES.keys()
    for name, leaf in LEAVES.items():
        assert state[name].shape == (5, *leaf.shape)
        assert state[name].dtype == leaf.dtype
        np.testing.assert_array_equal(np.asarray(pool.view(leaf.path)), np.asarray(state[name]))
    with pytest.raises(KeyError, match=r"no state leaf 'line'; there are .*\['line'\]"):
        pool.view("line")


def test_a_model_without_state_has_rows_of_no_bytes() -> None:
    pool = Pool(StateSpec((), jax.tree.structure({})), 2)
    pool.admit(["a", "b"])
    plan = pool.plan(["a"], rows=2)
    pool.commit([(plan, [])])
    assert pool.slot_bytes == 0
    assert pool.has_state("a")
    assert pool.read(["a", "b"]) == [b"", b""]
    pool.fork("a", "b")
    pool.reset("a")
    pool.release(["a", "b"])
    assert pool.free == 2


def test_warming_leaves_every_row_as_it_was() -> None:
    pool = Pool(SMALL, 4)
    pool.admit(["a", "b"])
    rows = run(pool, ["a", "b"], seed=1)
    pool.warm()
    assert pool.read(["a", "b"]) == [rows["a"], rows["b"]]
    assert on_device(pool).count(nothing(pool)) == 2


# Any sequence of calls, against a dict

SLOTS = 5
NAMES = st.sampled_from("abcdefg")
SEEDS = st.integers(0, 10_000)


class PoolAgainstDict(RuleBasedStateMachine):
    """A pool of 5 slots beside a dict from session to bytes; 7 sessions compete for it."""

    @initialize()
    def empty(self) -> None:
        self.pool = Pool(SMALL, SLOTS)
        self.rows: dict[str, bytes] = {}
        # What a plan was made on; another object once a row was changed by no plan.
        self.lives: dict[str, object] = {}
        self.flights: list[tuple[Plan, list[object], list[Any], list[bytes]]] = []

    def held(self, names: Any) -> list[str]:
        return [name for name in dict.fromkeys(names) if name in self.rows]

    def enter(self, names: list[str]) -> None:
        for name in names:
            if name not in self.rows:
                self.rows[name], self.lives[name] = b"", object()

    @rule(
        names=st.lists(NAMES, max_size=4),
        forks=st.lists(NAMES, max_size=2),
        take_back=st.booleans(),
    )
    def admit(self, names: list[str], forks: list[str], take_back: bool) -> None:
        new = {*names, *forks} - self.rows.keys()
        admission = self.pool.admit(names, forks)
        short = max(len(new) - (SLOTS - len(self.rows)), 0)
        assert (bool(admission), admission.short) == (short == 0, short)
        assert set(admission.taken) == (set() if short else new)
        if take_back:
            self.pool.rollback_admit(admission)
        elif admission:
            self.enter(sorted(new))

    @rule(names=st.lists(NAMES, min_size=1, max_size=4), padding=st.integers(0, 3), seed=SEEDS)
    def begin(self, names: list[str], padding: int, seed: int) -> None:
        sessions = self.held(names)
        rows = len(sessions) + padding
        if not rows:
            return
        plan = self.pool.plan(sessions, rows=rows, ahead=[flight[0] for flight in self.flights])
        coming = {name for flight in self.flights for name in flight[0].sessions}
        assert plan.has_state[: plan.num_rows].tolist() == [
            bool(self.rows[name]) or name in coming for name in sessions
        ]
        new = random_rows(SMALL, rows, seed)
        self.flights.append(
            (plan, [self.lives[name] for name in sessions], new, SMALL.pack(new, rows))
        )

    @precondition(lambda self: self.flights)
    @rule(dropped=st.booleans())
    def finish(self, dropped: bool) -> None:
        plan, lives, new, raws = self.flights.pop(0)
        current = [
            self.lives.get(name) is life for name, life in zip(plan.sessions, lives, strict=True)
        ]
        if all(current):
            self.pool.check(plan)
        else:
            with pytest.raises(StalePlan):
                self.pool.check(plan)
        if dropped:
            return
        self.pool.commit([(plan, new)])
        for name, raw, is_current in zip(plan.sessions, raws, current, strict=False):
            if is_current:
                self.rows[name] = raw

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), onto=NAMES)
    def fork(self, data: st.DataObject, onto: str) -> None:
        source = data.draw(st.sampled_from(sorted(self.rows)))
        if onto not in self.rows and len(self.rows) == SLOTS:
            with pytest.raises(PoolFull):
                self.pool.fork(source, onto)
            return
        self.pool.fork(source, onto)
        self.rows[onto], self.lives[onto] = self.rows[source], object()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.rows)))
        self.pool.reset(name)
        self.rows[name], self.lives[name] = b"", object()

    @rule(names=st.lists(NAMES, max_size=3))
    def release(self, names: list[str]) -> None:
        self.pool.release(names)
        for name in names:
            self.rows.pop(name, None)
            self.lives.pop(name, None)

    @rule(names=st.lists(NAMES, max_size=3), seed=SEEDS, rest=st.booleans())
    def write(self, names: list[str], seed: int, rest: bool) -> None:
        sessions = self.held(names)
        raws = packed(SMALL, len(sessions), seed) if sessions else []
        if rest and raws:
            raws[0] = b""
        self.pool.write(dict(zip(sessions, raws, strict=True)))
        for name, raw in zip(sessions, raws, strict=True):
            self.rows[name], self.lives[name] = raw, object()

    @rule(names=st.lists(NAMES, max_size=2), seed=SEEDS)
    def write_rubbish(self, names: list[str], seed: int) -> None:
        sessions = self.held(names)
        if sessions:
            raws = dict(zip(sessions, packed(SMALL, len(sessions), seed), strict=True))
            raws[sessions[-1]] += b"\0"
            with pytest.raises(ValueError, match="bytes"):
                self.pool.write(raws)

    @invariant()
    def every_row_is_what_the_dict_says(self) -> None:
        pool, slots = self.pool, self.pool.sessions
        assert slots.keys() == self.rows.keys()
        assert len(set(slots.values())) == len(slots), "two sessions share a slot"
        assert pool.free + len(pool) == pool.slots == SLOTS
        expected = [bytes(pool.slot_bytes)] * SLOTS  # free or at rest: zero
        for name, raw in self.rows.items():
            expected[slots[name]] = raw or bytes(pool.slot_bytes)
        assert on_device(pool) == expected
        assert pool.read(list(self.rows)) == list(self.rows.values())
        assert pool.fresh == {slots[name] for name, raw in self.rows.items() if not raw}


PoolAgainstDict.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestPoolAgainstDict = PoolAgainstDict.TestCase
