"""Row counts: which agree, which are cheapest, and that nothing compiles once they are chosen."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving_models import filters, served
from slotstream_worker import CannotStream, StreamModel, StreamServer, models
from slotstream_worker.engine import cover as cover_module
from slotstream_worker.engine import probe as probe_module
from slotstream_worker.engine.cover import Cover
from slotstream_worker.engine.engine import Engine
from slotstream_worker.engine.launch import Launched, Launcher
from slotstream_worker.engine.model import random_frames
from slotstream_worker.engine.pool import Plan, Pool
from slotstream_worker.engine.probe import Measured, Probe, _apart, _why, candidates, probe

LAUNCH_MS = cover_module._LAUNCH_MS


@functools.cache
def model_of(name: str) -> StreamModel:
    return served() if name == "served" else exact() if name == "exact" else filters()


def exact() -> StreamModel:
    """Sums of whole numbers: no row count can round them."""

    def step(variables: Any, carry: Any, frames: jax.Array) -> Any:
        sums = carry[None] + jnp.cumsum(frames * variables["gain"], axis=0, dtype=jnp.int32)
        return sums[-1], {"sums": sums, "halves": sums.astype(jnp.float32) * jnp.float32(0.5)}

    return models.carry(
        step,
        lambda batch: jnp.zeros((batch, 2), jnp.int32),
        {"gain": np.int32(3)},
        frame=2,
        sample_shape=(2,),
        dtype=np.int32,
    )


# Covers

COSTS = st.dictionaries(st.integers(1, 12), st.floats(0, 10), min_size=1, max_size=4)


def cheapest(cost_ms: dict[int, float], rows: int) -> float:
    """By trying every multiset of counts that could hold the rows."""
    longest = -(-rows // min(cost_ms))
    return min(
        sum(cost_ms[count] + LAUNCH_MS for count in chosen)
        for n in range(longest + 1)
        for chosen in itertools.combinations_with_replacement(sorted(cost_ms), n)
        if sum(chosen) >= rows
    )


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(COSTS, st.integers(0, 9))
def test_a_cover_costs_no_more_than_any_other(cost_ms: dict[int, float], rows: int) -> None:
    cover = Cover(cost_ms)
    counts = cover.split(rows)
    spent = sum(cost_ms[count] + LAUNCH_MS for count in counts)
    assert spent == pytest.approx(cheapest(cost_ms, rows), abs=1e-9)
    assert cover.cost(rows) == pytest.approx(spent, abs=1e-9)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(COSTS, st.lists(st.integers(0, 200), min_size=1, max_size=4))
def test_a_covers_launches_hold_the_rows_and_none_is_idle(
    cost_ms: dict[int, float], loads: list[int]
) -> None:
    cover = Cover(cost_ms)
    for rows in loads:  # in any order: what was found before is kept
        counts = cover.split(rows)
        assert sum(counts) >= rows
        assert set(counts) <= cost_ms.keys()
        assert counts == sorted(counts, reverse=True), "the full launches come first"
        assert sum(counts[:-1]) < max(rows, 1), "the last launch has a row to run"
        assert cover.cost(rows) <= cover.cost(rows + 1) + 1e-9, "more rows never cost less"


def test_a_tie_is_one_launch_and_not_many() -> None:
    assert Cover({1: 1.0, 4: 4.0}).split(8) == [4, 4]
    assert Cover({1: 0.0, 64: 0.0}).split(64) == [64]
    assert Cover({2: 1.0, 8: 1.1}).split(3) == [8]
    assert Cover({16: 1.0}).split(0) == []


@pytest.mark.parametrize("cost_ms", [{}, {0: 1.0}, {-4: 1.0, 4: 1.0}], ids=str)
def test_row_counts_are_one_or_more(cost_ms: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="row counts are 1 or more"):
        Cover(cost_ms)


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 4]),
        (4, [1, 4]),
        (5, [1, 4, 8]),
        (16, [1, 4, 16]),
        (17, [1, 4, 16, 32]),
        (100, [1, 4, 16, 64, 128]),
        (1024, [1, 4, 16, 64, 128, 256, 1024]),
        (10**6, [1, 4, 16, 64, 128, 256, 1024]),
    ],
)
def test_candidates_climb_from_one_row_to_all_slots(slots: int, expected: list[int]) -> None:
    assert candidates(slots) == expected


def test_candidates_stop_at_the_top_they_are_given() -> None:
    assert candidates(10**5, top=64) == [1, 4, 16, 64]
    for slots in range(1, 300):
        counts = candidates(slots, top=128)
        assert counts[-1] >= min(slots, 128)
        assert counts[0] == 1
        assert counts == sorted(set(counts))


# Groups, with launches made to differ

Effect = Callable[[Plan, dict[str, Any]], dict[str, Any]]


@pytest.fixture
def disturbed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Change what launches give, and give each row count a time."""

    def disturb(effect: Effect, ms: dict[int, float] | None = None) -> None:
        launch = Launcher.launch

        def changed(self: Launcher, pool: Pool, plan: Plan, frames: Any) -> Launched:
            ran = launch(self, pool, plan, frames)
            outputs = effect(plan, ran.outputs)
            return dataclasses.replace(ran, outputs=jax.tree.map(jnp.asarray, outputs))

        monkeypatch.setattr(Launcher, "launch", changed)
        if ms is not None:
            monkeypatch.setattr(probe_module, "_time", lambda _launcher, _pool, count: ms[count])

    return disturb


@functools.cache
def launcher_of(name: str) -> Launcher:
    return Launcher(model_of(name))


def fresh_probe(counts: list[int], slots: int = 40, name: str = "exact") -> Probe:
    launcher = launcher_of(name)
    return probe(launcher, Pool(launcher.model.spec, slots), counts)


def rounded(by: Callable[[int], float]) -> Effect:
    """Outputs off by a little that depends on the row count alone."""

    def effect(plan: Plan, outputs: dict[str, Any]) -> dict[str, Any]:
        off = np.float32(by(len(plan.slot_indices)))
        return {
            name: array + off if array.dtype == np.float32 else array
            for name, array in outputs.items()
        }

    return effect


def test_row_counts_that_differ_in_a_bit_are_never_used_together(
    disturbed: Callable[..., None],
) -> None:
    flat = dict.fromkeys((1, 4, 8, 16), 1.0)
    disturbed(rounded(lambda count: 1e-3 * (count > 4)), flat)
    found = fresh_probe([16, 1, 8, 4])
    assert [m.count for m in found.measured] == [1, 4, 8, 16]
    assert all(m.steady for m in found.measured)
    assert sorted(found.groups) == [(1, 4), (8, 16)]
    assert found.row_counts == (8, 16), "they serve 40 slots in fewer launches"
    digests = {m.count: m.digest for m in found.measured}
    assert digests[1] == digests[4] != digests[8] == digests[16] == found.digest
    assert found.cover.cost_ms.keys() == {8, 16}


@pytest.mark.parametrize(
    ("ms", "chosen"),
    [
        ({1: 1.0, 4: 0.1, 16: 100.0}, (4,)),
        ({1: 1.0, 4: 10.0, 16: 1.5}, (1, 16)),
        ({1: 0.01, 4: 50.0, 16: 0.1}, (1, 16)),
    ],
    ids=["the middle one is cheap", "the outer ones are", "far cheaper"],
)
def test_the_group_that_serves_few_and_many_rows_cheapest_is_chosen(
    disturbed: Callable[..., None], ms: dict[int, float], chosen: tuple[int, ...]
) -> None:
    disturbed(rounded(lambda count: 1e-3 * (count == 4)), ms)
    found = fresh_probe(list(ms))
    assert sorted(found.groups) == [(1, 16), (4,)]
    assert found.row_counts == chosen
    assert found.digest in {m.digest for m in found.measured if m.count in chosen}


def by_position(only: int | None = None) -> Effect:
    """Rows that know where in the launch they are."""

    def effect(plan: Plan, outputs: dict[str, Any]) -> dict[str, Any]:
        rows = len(plan.slot_indices)
        if only not in (None, rows):
            return outputs
        return {
            name: array
            + np.arange(rows).astype(array.dtype).reshape(-1, *[1] * (array.ndim - 1))
            * np.ones(array.shape, array.dtype)
            for name, array in ((n, np.asarray(a)) for n, a in outputs.items())
        }

    return effect


def test_a_row_count_whose_rows_depend_on_their_place_is_left_out(
    disturbed: Callable[..., None],
) -> None:
    disturbed(by_position(only=4), {1: 9.0, 4: 0.001, 16: 9.0})
    found = fresh_probe([1, 4, 16])
    assert {m.count: m.steady for m in found.measured} == {1: True, 4: False, 16: True}
    assert all(4 not in group for group in found.groups)
    assert 4 not in found.row_counts


def test_a_model_whose_rows_depend_on_their_place_everywhere_cannot_be_served(
    disturbed: Callable[..., None],
) -> None:
    disturbed(by_position(), {4: 1.0, 16: 1.0})
    with pytest.raises(CannotStream, match=r"normalises or mixes over the batch.*train=False"):
        fresh_probe([4, 16])


def test_a_probe_counts_states_and_not_only_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launcher.launch

    def changed(self: Launcher, pool: Pool, plan: Plan, frames: Any) -> Launched:
        ran = launch(self, pool, plan, frames)
        if len(plan.slot_indices) == 4:
            first, *others = ran.rows
            ran = dataclasses.replace(ran, rows=[first + 1, *others])
        return dataclasses.replace(
            ran, outputs={name: jnp.zeros_like(array) for name, array in ran.outputs.items()}
        )

    monkeypatch.setattr(Launcher, "launch", changed)
    assert sorted(fresh_probe([1, 4, 16]).groups) == [(1, 16), (4,)]


def test_the_groups_of_a_probe_are_the_steady_counts_by_digest() -> None:
    found = Probe(
        (),
        "",
        (
            Measured(1, 1.0, "a", True),
            Measured(2, 1.0, "b", True),
            Measured(4, 1.0, "a", False),
            Measured(8, 1.0, "a", True),
        ),
    )
    assert found.groups == [(1, 8), (2,)]


# The probe of a real model


@functools.cache
def probed(name: str, slots: int, counts: tuple[int, ...]) -> tuple[Probe, Pool]:
    pool = Pool(model_of(name).spec, slots)
    return probe(launcher_of(name), pool, counts), pool


@pytest.mark.parametrize("name", ["served", "exact"])
def test_the_digest_depends_neither_on_the_slots_nor_on_the_row_count_within_a_group(
    name: str,
) -> None:
    together, _ = probed(name, 40, (4, 16))
    for group in together.groups:
        for count in group:
            digests = {probed(name, slots, (count,))[0].digest for slots in (3, 7)}
            assert digests == {next(m.digest for m in together.measured if m.count in group)}
    assert len(together.digest) == 16
    if name == "exact":
        assert together.groups == [(4, 16)]


def test_the_digest_tells_models_apart() -> None:
    model = model_of("exact")
    digests = {
        probe(
            Launcher(dataclasses.replace(model, variables={"gain": np.int32(gain)})),
            Pool(model.spec, 7),
            [4],
        ).digest
        for gain in (3, 4, 5)
    }
    assert len(digests) == 3
    assert probed("exact", 7, (4,))[0].digest in digests


@pytest.mark.parametrize(("name", "slots"), [("served", 3), ("exact", 3), ("exact", 40)])
def test_the_pool_is_empty_and_zero_after_the_probe(name: str, slots: int) -> None:
    _, pool = probed(name, slots, (4,))
    assert (pool.free, len(pool), pool.fresh) == (slots, 0, set())
    for array in pool.arrays:
        assert not np.asarray(array)[:slots].any()
    admission = pool.admit(range(slots))
    assert admission
    assert pool.fresh == set(range(slots)), "every slot is there once"
    pool.rollback_admit(admission)


def test_a_probe_refuses_a_pool_in_use() -> None:
    pool = Pool(model_of("exact").spec, 40)
    pool.admit(["someone"])
    with pytest.raises(RuntimeError, match="needs an empty pool, and this one holds 1"):
        probe(launcher_of("exact"), pool, [4])
    assert set(pool.sessions) == {"someone"}


def test_an_engine_prepared_with_given_row_counts_measures_these_only() -> None:
    engine = Engine(model_of("exact"), 40)
    assert engine.row_counts == ()
    with pytest.raises(RuntimeError, match=r"call prepare\(\) first"):
        engine.begin([], np.zeros((0, *engine.model.frame_shape), np.int32))
    seen: list[int] = []
    found = engine.prepare([16, 4, 16], progress=seen.append)
    assert seen == [4, 16]
    assert [m.count for m in found.measured] == [4, 16]
    assert all(m.ms > 0 for m in found.measured)
    assert set(engine.row_counts) <= {4, 16}
    assert engine.row_counts == found.row_counts


def test_an_engine_measures_the_whole_ladder_by_default() -> None:
    engine = Engine(model_of("exact"), 7)
    seen: list[int] = []
    engine.prepare(progress=seen.append)
    assert seen == candidates(7) == [1, 4, 8]
    assert engine.row_counts


# Nothing compiles in traffic


class Compilations(logging.Handler):
    """What JAX compiles, by its own log."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("Compiling "):
            self.seen.append(record.getMessage()[:200])

    def __enter__(self) -> list[str]:
        self.flag = jax.log_compiles(True)
        self.flag.__enter__()
        logging.getLogger("jax").addHandler(self)
        return self.seen

    def __exit__(self, *error: object) -> None:
        logging.getLogger("jax").removeHandler(self)
        self.flag.__exit__(*error)


def test_a_compilation_is_seen_when_there_is_one() -> None:
    with Compilations() as seen:
        jax.jit(lambda x: x * 3 + 1)(np.ones(5, np.float32))
    assert len(seen) == 1


def traffic(engine: Engine, rng: np.random.Generator) -> None:
    """Rounds of every size from rest and on, and every other change to a row."""
    pool, slots = engine.pool, engine.pool.slots
    sessions = [f"s{k}" for k in range(slots)]
    for size in range(1, slots + 1):
        some = sessions[:size]
        pool.admit(some)
        frames = random_frames(rng, (size, *engine.model.frame_shape), engine.model.dtype)
        engine.run(some, frames)
        engine.run(some, frames, from_rest=some[::2])
        raws = pool.read(some)
        pool.write(dict(zip(some, raws, strict=True)))
        pool.reset(some[-1])
        if size < slots:
            pool.fork(some[0], "fork")
            engine.run(["fork"], frames[:1])
            pool.release(["fork"])
        pool.release(some)


@pytest.mark.parametrize("name", ["served", "exact"])
def test_nothing_compiles_after_an_engine_was_prepared(name: str) -> None:
    engine = Engine(model_of(name), 19)
    engine.prepare((1, 4, 16))
    with Compilations() as seen:
        traffic(engine, np.random.default_rng(1))
    assert seen == []


def test_nothing_compiles_in_traffic_with_variables_bound_to_a_device() -> None:
    # As a restored checkpoint has them.
    model = model_of("function")
    bound = jax.device_put(model.variables, jax.devices()[0])
    engine = Engine(dataclasses.replace(model, variables=bound), 5)
    engine.prepare((4,))
    with Compilations() as seen:
        traffic(engine, np.random.default_rng(2))
    assert seen == []


def test_nothing_compiles_while_a_stream_server_serves() -> None:
    server = StreamServer(model_of("exact"), slots=6)
    rng = np.random.default_rng(3)
    with Compilations() as seen:
        for size in range(1, 7):
            sessions = [server.open() for _ in range(size)]
            for _ in range(3):
                frames = random_frames(rng, (size, *server.model.frame_shape), server.model.dtype)
                for session, frame in zip(sessions, frames, strict=True):
                    server.submit(session, frame)
                server.step()
            for session in sessions:
                server.close(session)
    assert seen == []


# What it says where no row count does


@pytest.mark.parametrize(
    ("off", "words"),
    [
        (0.4, "depend on the other sessions in the batch .*0.4.*train=False"),
        (float("inf"), "depend on the other sessions"),
        (3e-7, "launches of 1, 4 rows .* rounded by its place in the batch .*3e-07.*--row-counts"),
    ],
)
def test_rounding_by_place_is_told_from_rows_that_mix(off, words) -> None:
    alone, shared = Measured(1, 0.1, "a", True), Measured(4, 0.1, "b", False, off)
    assert re.search(words, _why(Probe((), "", (alone, shared))))


def test_how_far_two_runs_are_apart_is_of_their_largest_value() -> None:
    a = [[np.float32([1, -4]), np.int32([2])], [np.float32([np.nan, 0.5])]]
    b = [[np.float32([1, -4]), np.int32([2])], [np.float32([np.nan, 0.7])]]
    assert _apart(a, a) == 0
    assert _apart(a, b) == pytest.approx(0.2 / 4)
    assert _apart(a, [a[0], [np.float32([1, 0.5])]]) == float("inf")
    assert _apart([[np.zeros(2)]], [[np.float64([0, 1e-9])]]) == 1
