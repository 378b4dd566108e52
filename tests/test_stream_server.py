"""StreamServer: sessions that open, close and fail one by one, and share nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving_models import RecurrentMLP, direct, filters, linen_model, served
from slotstream_worker import StreamModel, StreamServer, models
from slotstream_worker.engine.engine import Engine, Failed, Ran
from slotstream_worker.engine.model import random_frames

SLOTS, FRAME, WIDTH = 7, 4, 6
POISON = 666.0


@functools.cache
def shared() -> StreamServer:
    return StreamServer(served(), slots=SLOTS, row_counts=(4,))


@pytest.fixture
def server() -> Iterator[StreamServer]:
    """One server for every test here: spiking, recurrent, two outputs; left empty."""
    server = shared()
    yield server
    for session in server.sessions:
        server.close(session)


def explode(frames: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if (np.asarray(frames) == POISON).any():
        raise RuntimeError("a poisoned frame")
    return np.asarray(frames)


@functools.cache
def fragile() -> StreamServer:
    """Running sums; a launch with a poisoned frame in it raises on the device."""

    def step(variables: Any, carry: Any, frames: jax.Array) -> Any:
        shape = jax.ShapeDtypeStruct(frames.shape, frames.dtype)
        checked = jax.pure_callback(explode, shape, frames)
        sums = carry[None] + jnp.cumsum(checked * variables["gain"], axis=0)
        return sums[-1], sums

    model = models.carry(
        step,
        lambda batch: jnp.zeros((batch, 3), jnp.float32),
        {"gain": np.float32(2)},
        frame=2,
        sample_shape=(3,),
    )
    return StreamServer(model, slots=SLOTS, row_counts=(4,))


@pytest.fixture
def fragile_server() -> Iterator[StreamServer]:
    server = fragile()
    yield server
    for session in server.sessions:
        server.close(session)


def stream(seed: int, frames: int, shape: tuple[int, ...] = (FRAME, WIDTH)) -> Any:
    return np.random.default_rng(seed).normal(size=(frames, *shape)).astype(np.float32) * 1.5


def rows(server: StreamServer) -> list[bytes]:
    """Bytes of every slot's state, from the device."""
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(server.state)]
    return [b"".join(array[k].tobytes() for array in arrays) for k in range(server.slots)]


def bits(outputs: Any) -> dict[str, bytes]:
    outputs = outputs if isinstance(outputs, dict) else {"output": outputs}
    return {name: array.tobytes() for name, array in outputs.items()}


def alone(server: StreamServer, frames: Any) -> list[dict[str, bytes]]:
    """What the frames give in a session that has the server to itself."""
    session = server.open()
    futures = [server.submit(session, frame) for frame in frames]
    server.run()
    server.close(session)
    return [bits(future.result(timeout=0)) for future in futures]


# Opening and closing


def test_a_full_server_refuses_to_open_and_says_what_to_do(server: StreamServer) -> None:
    sessions = [server.open() for _ in range(SLOTS)]
    assert len(set(sessions)) == SLOTS
    with pytest.raises(RuntimeError, match=f"all {SLOTS} slots hold sessions; close one first"):
        server.open()
    assert set(server.sessions) == set(sessions), "the refusal changed nothing"
    server.close(sessions[3])
    another = server.open()
    assert another not in sessions, "an id is never used again"


def test_opening_says_nothing_of_earlier_sessions(server: StreamServer) -> None:
    first = server.open()
    server.close(first)
    for _ in range(2 * SLOTS):
        session = server.open()
        assert isinstance(session, int)
        assert session > first
        first = session
        server.close(session)
    assert server.sessions == {}


def test_closing_frees_the_slot_zeroes_its_row_and_cancels_what_waits(server: StreamServer) -> None:
    keeper, session = server.open(), server.open()
    done = server.submit(session, stream(1, 1)[0])
    server.run()
    waiting = [server.submit(session, frame) for frame in stream(2, 3)]
    kept = server.submit(keeper, stream(3, 1)[0])
    slot = server.sessions[session]
    assert any(rows(server)[slot])
    server.close(session)
    assert all(future.cancelled() for future in waiting)
    with pytest.raises(CancelledError):
        waiting[0].result(timeout=0)
    assert done.result(timeout=0), "a result that is there stays there"
    assert session not in server.sessions
    assert session not in server.pending
    assert not any(rows(server)[slot])
    assert server.step() == 1
    assert kept.done()


@pytest.mark.parametrize("unknown", [10**6, -1, "0", None])
def test_a_session_that_is_not_open_is_a_key_error(server: StreamServer, unknown: Any) -> None:
    with pytest.raises(KeyError, match=r"no open session .*; open\(\) starts one"):
        server.submit(unknown, stream(0, 1)[0])
    with pytest.raises(KeyError, match="no open session"):
        server.close(unknown)


def test_a_closed_session_stays_closed(server: StreamServer) -> None:
    session = server.open()
    server.close(session)
    server.open()
    with pytest.raises(KeyError, match=f"no open session {session}"):
        server.submit(session, stream(0, 1)[0])
    with pytest.raises(KeyError, match=f"no open session {session}"):
        server.close(session)


def test_the_next_holder_of_a_slot_starts_at_rest(server: StreamServer) -> None:
    frames = stream(4, 2)
    expected = alone(server, frames)
    others = [server.open() for _ in range(SLOTS - 1)]
    for seed in range(3):
        old = server.open()
        for frame in stream(seed, 3):
            server.submit(old, frame)
        server.run()
        slot = server.sessions[old]
        server.close(old)
        heir = server.open()
        assert server.sessions[heir] == slot, "the only free slot"
        assert server.fresh >= {slot}
        futures = [server.submit(heir, frame) for frame in frames]
        server.run()
        assert [bits(f.result(timeout=0)) for f in futures] == expected
        server.close(heir)
    assert set(server.sessions) == set(others)


# Frames


@pytest.mark.parametrize(
    "shape",
    [(FRAME, WIDTH + 1), (FRAME - 1, WIDTH), (WIDTH, FRAME), (1, FRAME, WIDTH), (FRAME,), ()],
)
def test_a_frame_of_another_shape_is_refused_with_both_shapes(
    server: StreamServer, shape: tuple[int, ...]
) -> None:
    session = server.open()
    with pytest.raises(ValueError, match=r"a frame is \(4, 6\), got \(") as refusal:
        server.submit(session, np.zeros(shape, np.float32))
    assert str(shape) in str(refusal.value)
    assert not server.pending[session]
    assert server.step() == 0


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "U3", "datetime64[s]", "object"])
def test_a_frame_of_another_kind_is_refused(server: StreamServer, dtype: str) -> None:
    session = server.open()
    with pytest.raises(ValueError, match="float32"):
        server.submit(session, np.zeros((FRAME, WIDTH), np.dtype(dtype)))
    assert not server.pending[session]


@pytest.mark.parametrize(
    "convert",
    [
        lambda f: f.astype(np.float64),
        lambda f: f.tolist(),
        jnp.asarray,
        np.asfortranarray,
        lambda f: np.repeat(f, 2, axis=0)[::2],
        lambda f: f.astype(np.int64),
        lambda f: f.astype(np.int8),
        lambda f: f > 0,
    ],
    ids=["float64", "list", "jax", "fortran", "strided", "int64", "int8", "bool"],
)
def test_numbers_that_convert_without_loss_of_kind_are_taken(
    server: StreamServer, convert: Any
) -> None:
    frame = np.round(stream(5, 1)[0] * 2)
    given = convert(frame)
    session = server.open()
    future = server.submit(session, given)
    server.run()
    (expected,) = alone(server, [np.asarray(given).astype(np.float32)])
    assert bits(future.result(timeout=0)) == expected


def test_a_frame_of_integers_takes_no_fractions() -> None:
    def step(variables: Any, carry: Any, frames: jax.Array) -> Any:
        sums = carry[None] + jnp.cumsum(frames.astype(jnp.int32), axis=0, dtype=jnp.int32)
        return sums[-1], sums

    server = StreamServer(
        models.carry(
            step,
            lambda batch: jnp.zeros((batch, 2), jnp.int32),
            {},
            frame=3,
            sample_shape=(2,),
            dtype=np.int16,
        ),
        slots=2,
        row_counts=(2,),
    )
    session = server.open()
    with pytest.raises(ValueError, match="int16, and float32 does not convert"):
        server.submit(session, np.ones((3, 2), np.float32))
    future = server.submit(session, np.full((3, 2), 5, np.int64))
    server.run()
    np.testing.assert_array_equal(future.result(timeout=0), [[5, 5], [10, 10], [15, 15]])


def test_submit_copies_its_frame(server: StreamServer) -> None:
    frames = stream(6, 3)
    expected = alone(server, frames)
    session, buffer, futures = server.open(), np.empty((FRAME, WIDTH), np.float32), []
    for frame in frames:
        buffer[...] = frame
        futures.append(server.submit(session, buffer))
    buffer[...] = np.nan
    server.run()
    assert [bits(f.result(timeout=0)) for f in futures] == expected


def test_a_cancelled_frame_is_dropped_and_the_next_runs_from_where_the_state_was(
    server: StreamServer,
) -> None:
    frames = stream(7, 5)
    expected = alone(server, frames[[0, 2, 4]])
    session = server.open()
    futures = [server.submit(session, frame) for frame in frames]
    assert futures[1].cancel()
    assert server.step() == 1
    assert futures[3].cancel()
    assert not futures[0].cancel(), "it has run"
    assert server.step() == 1, "the cancelled frame takes no round of its own"
    assert futures[2].done()
    server.run()
    assert [bits(futures[k].result(timeout=0)) for k in (0, 2, 4)] == expected
    assert futures[1].cancelled()
    assert futures[3].cancelled()


def test_a_round_of_cancelled_frames_runs_nothing(server: StreamServer) -> None:
    sessions = [server.open() for _ in range(3)]
    before = rows(server)
    for session in sessions:
        for frame in stream(session, 2):
            server.submit(session, frame).cancel()
    assert server.step() == 0
    assert rows(server) == before
    assert server.fresh == set(server.sessions.values())
    assert not any(server.pending.values())


# Rounds


def test_step_runs_one_frame_of_every_session_that_has_one_and_says_how_many(
    server: StreamServer,
) -> None:
    sessions = [server.open() for _ in range(6)]
    for k, session in enumerate(sessions):
        for frame in stream(k, k):
            server.submit(session, frame)
    assert [len(server.pending[s]) for s in sessions] == [0, 1, 2, 3, 4, 5]
    assert [server.step() for _ in range(6)] == [5, 4, 3, 2, 1, 0]
    assert server.fresh == {server.sessions[sessions[0]]}


def test_run_steps_until_no_frame_waits(server: StreamServer) -> None:
    sessions = [server.open() for _ in range(SLOTS)]
    futures = [server.submit(s, frame) for k, s in enumerate(sessions) for frame in stream(k, k)]
    assert not any(future.done() for future in futures)
    server.run()
    assert all(future.done() for future in futures)
    assert not any(server.pending.values())
    server.run()
    assert server.step() == 0


def test_a_session_without_a_frame_keeps_its_row_bit_for_bit(server: StreamServer) -> None:
    paused = [server.open(), server.open()]
    busy = [server.open() for _ in range(SLOTS - 2)]
    server.submit(paused[0], stream(8, 1)[0])  # the other one stays at rest
    server.run()
    slots = [server.sessions[session] for session in paused]
    before = [rows(server)[slot] for slot in slots]
    assert any(before[0])
    assert not any(before[1])
    for round_ in range(4):
        for session in busy[: 1 + 2 * round_]:
            server.submit(session, stream(session + round_, 1)[0])
        assert server.step() == min(1 + 2 * round_, len(busy))
        assert [rows(server)[slot] for slot in slots] == before


def test_outputs_of_a_finished_future_stay_as_they_are(server: StreamServer) -> None:
    session = server.open()
    futures = [server.submit(session, frame) for frame in stream(9, 2)]
    server.run()
    kept = [future.result(timeout=0) for future in futures]
    copies = [bits(outputs) for outputs in kept]
    others = [server.open() for _ in range(4)]
    for seed in range(3):
        for other in [session, *others]:
            server.submit(other, stream(seed + other, 1)[0])
        server.run()
    server.close(session)
    assert [bits(outputs) for outputs in kept] == copies
    kept[0]["scores"][...] = 7.0  # the caller's own, to write into
    assert bits(kept[1]) == copies[1]
    assert bits(futures[1].result(timeout=0)) == copies[1]


def test_nan_reaches_neither_the_neighbours_nor_the_slots_next_session(
    server: StreamServer,
) -> None:
    frames = stream(10, 3)
    expected = alone(server, frames)
    sick, *healthy = [server.open() for _ in range(SLOTS)]
    for frame in frames:
        server.submit(sick, np.full((FRAME, WIDTH), np.nan, np.float32))
        futures = [server.submit(session, frame) for session in healthy]
        server.run()
        assert len({str(bits(f.result(timeout=0))) for f in futures}) == 1
    assert bits(futures[0].result(timeout=0)) == expected[-1]
    slot = server.sessions[sick]
    assert any(
        np.isnan(np.asarray(leaf)[slot].astype(np.float32)).any()
        for leaf in jax.tree.leaves(server.state)
    ), "its membranes are NaN"
    server.close(sick)
    heir = server.open()
    assert server.sessions[heir] == slot
    assert not any(rows(server)[slot])
    futures = [server.submit(heir, frame) for frame in frames]
    server.run()
    assert [bits(f.result(timeout=0)) for f in futures] == expected


def test_what_a_server_holds_is_readable(server: StreamServer) -> None:
    assert (server.slots, server.frame) == (SLOTS, FRAME)
    assert (server.sessions, server.fresh, server.pending) == ({}, set(), {})
    a, b = server.open(), server.open()
    assert server.sessions.keys() == {a, b}
    assert server.fresh == set(server.sessions.values())
    frame = stream(11, 1)[0]
    future = server.submit(a, frame)
    ((waiting, same),) = server.pending[a]
    assert same is future
    np.testing.assert_array_equal(waiting, frame)
    server.run()
    assert server.fresh == {server.sessions[b]}
    _, state = jax.jit(server.model.apply)(server.model.variables, None, frame[:, None])
    assert jax.tree.structure(server.state) == jax.tree.structure(state)
    for leaf, expected in zip(jax.tree.leaves(server.state), jax.tree.leaves(state), strict=True):
        assert leaf.shape == (SLOTS + 1, *expected.shape[1:])
        np.testing.assert_allclose(
            np.asarray(leaf)[server.sessions[a]].astype(np.float64),
            np.asarray(expected)[0].astype(np.float64),
            atol=1e-6,
        )


# A step that raises


def test_a_step_that_raises_fails_every_frame_it_took_and_changes_no_state(
    fragile_server: StreamServer,
) -> None:
    server = fragile_server
    sessions = [server.open() for _ in range(6)]  # two launches, one of them sound
    streams = {s: stream(s, 4, (2, 3)) for s in sessions}
    sums = {s: np.cumsum(streams[s].reshape(-1, 3) * 2, axis=0) for s in sessions}
    for session in sessions[:5]:
        server.submit(session, streams[session][0])
    server.run()
    before, fresh = rows(server), server.fresh
    assert sum(map(any, before)) == 5
    assert fresh == {server.sessions[sessions[5]]}

    poisoned = streams[sessions[2]][1].copy()
    poisoned[1, 0] = POISON
    futures = {
        s: server.submit(s, poisoned if s == sessions[2] else streams[s][1]) for s in sessions[:5]
    }
    later = server.submit(sessions[0], streams[sessions[0]][1])
    with pytest.raises(Exception, match="a poisoned frame") as raised:
        server.step()
    assert all(future.exception(timeout=0) is raised.value for future in futures.values())
    assert rows(server) == before
    assert server.fresh == fresh
    assert not later.done(), "it had not been taken"

    assert server.step() == 1
    parts = {
        s: [later] if s == sessions[0] else [server.submit(s, streams[s][1])] for s in sessions[:5]
    }
    for session in sessions[:5]:
        parts[session].append(server.submit(session, streams[session][2]))
    server.run()
    for session, futures_of in parts.items():
        got = np.concatenate([future.result(timeout=0) for future in futures_of])
        np.testing.assert_allclose(got, sums[session][2:6], rtol=1e-5, atol=1e-5)


def test_a_first_frame_that_raises_leaves_the_session_at_rest(fragile_server: StreamServer) -> None:
    server = fragile_server
    session = server.open()
    failed = server.submit(session, np.full((2, 3), POISON, np.float32))
    with pytest.raises(Exception, match="a poisoned frame"):
        server.run()
    assert failed.exception(timeout=0) is not None
    assert server.fresh == {server.sessions[session]}
    assert not any(map(any, rows(server)))
    future = server.submit(session, np.ones((2, 3), np.float32))
    server.run()
    np.testing.assert_array_equal(future.result(timeout=0), [[2] * 3, [4] * 3])


def test_a_round_that_failed_is_isolated_to_the_frame_that_raises() -> None:
    engine = Engine(fragile().model, 8)
    engine.prepare((4,))
    names = list("abcdefg")
    engine.pool.admit(names)
    frames = np.ones((7, 2, 3), np.float32)
    frames[4, 1, 2] = POISON
    outcomes = list(engine.isolate(names, frames))
    failed = [one for one in outcomes if isinstance(one, Failed)]
    ran = {
        s: one.outputs["output"][k]
        for one in outcomes
        if isinstance(one, Ran)
        for k, s in enumerate(one.sessions)
    }
    assert [one.session for one in failed] == ["e"]
    assert "a poisoned frame" in str(failed[0].error)
    assert set(ran) == set(names) - {"e"}
    assert all((outputs[-1] == 4).all() for outputs in ran.values()), "each ran once"
    assert engine.pool.fresh == {engine.pool.sessions["e"]}


# What is served


def test_a_stream_model_is_taken_as_it_is() -> None:
    model = filters()
    server = StreamServer(model, slots=3, row_counts=(2,))
    assert server.model is model
    frames = random_frames(np.random.default_rng(1), (2, *model.frame_shape), model.dtype)
    session = server.open()
    futures = [server.submit(session, frame) for frame in frames]
    server.run()
    outputs = [future.result(timeout=0) for future in futures]
    assert outputs[0].keys() == {"energy", "step"}
    expected = direct(model, frames.reshape(-1, *model.sample_shape))
    np.testing.assert_array_equal(np.concatenate([o["step"] for o in outputs]), expected["step"])
    np.testing.assert_allclose(
        np.concatenate([o["energy"] for o in outputs]), expected["energy"], rtol=1e-4
    )


@pytest.mark.parametrize(
    "given",
    [
        {"variables": {}},
        {"frame": 4},
        {"sample_shape": (6,)},
        {"dtype": "float32"},
        {"call": {}},
        {"frame": 4, "dtype": "float32"},
    ],
    ids="+".join,
)
def test_nothing_that_a_stream_model_brings_is_given_beside_it(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="brings its own " + ", ".join(given)):
        StreamServer(shared().model, slots=2, **given)


@pytest.mark.parametrize("missing", ["variables", "frame", "sample_shape"])
def test_a_linen_module_needs_its_variables_frame_and_sample_shape(missing: str) -> None:
    settings: dict[str, Any] = {"variables": {}, "frame": 4, "sample_shape": (6,)}
    del settings[missing]
    with pytest.raises(TypeError, match="variables, frame and sample_shape"):
        StreamServer(RecurrentMLP(), **settings, slots=2)


def test_a_server_has_at_least_one_slot() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        StreamServer(shared().model, slots=0)


def test_a_linen_module_with_its_variables_is_served_like_its_stream_model(
    server: StreamServer,
) -> None:
    module, model = RecurrentMLP(), linen_model(RecurrentMLP(), (WIDTH,), frame=FRAME)
    carried = {**model.variables, "state": {"left over": np.ones(3, np.float32)}}
    other = StreamServer(
        module, carried, slots=2, frame=FRAME, sample_shape=(WIDTH,), row_counts=(4,)
    )
    frames = stream(12, 3)
    assert alone(other, frames) == alone(server, frames)


def test_a_future_can_be_waited_for_from_another_thread(server: StreamServer) -> None:
    import threading

    session, seen = server.open(), []
    future: Future[Any] = server.submit(session, stream(13, 1)[0])
    waiter = threading.Thread(target=lambda: seen.append(future.result(timeout=30)))
    waiter.start()
    server.run()
    waiter.join(30)
    assert bits(seen[0]) == bits(future.result(timeout=0))


def test_a_model_of_one_array_gives_one_array(fragile_server: StreamServer) -> None:
    model: StreamModel = fragile_server.model
    assert model.single
    session = fragile_server.open()
    future = fragile_server.submit(session, np.ones((2, 3), np.float32))
    fragile_server.run()
    assert isinstance(future.result(timeout=0), np.ndarray)
    assert not shared().model.single


def test_a_server_keeps_no_rows_beside_its_own(server):
    frames = np.random.default_rng(3).normal(size=(2, SLOTS, FRAME, WIDTH)).astype(np.float32)
    sessions = []
    for frame in frames[0]:  # each step runs a first frame, which reads no row
        sessions.append(server.open())
        server.submit(sessions[-1], frame)
        server.step()
        assert not server.engine.pool._late
    for session, frame in zip(sessions, frames[1], strict=True):
        server.submit(session, frame)
    server.run()
    assert not server.engine.pool._late
