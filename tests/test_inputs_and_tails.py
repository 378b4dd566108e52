"""Several named inputs, last frames that are short, and what replies then carry, through Redis."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from slotstream import Client
from slotstream.codec import encode
from slotstream.errors import BadFrame
from slotstream.named import NamedFrames
from slotstream_worker import CannotStream, StreamModel, StreamServer, models
from slotstream_worker.engine import inputs as engine_inputs

FRAME = 6
SHAPES = {"audio": (5,), "gain": (), "keys": (3,), "spin": (2,), "talk": ()}
DTYPES = {
    "audio": np.float32,
    "gain": ml_dtypes.bfloat16,
    "keys": np.int16,
    "spin": np.complex64,
    "talk": np.bool_,
}


def several(outputs: Any = "all") -> StreamModel:
    """Five inputs of five dtypes; two outputs; a state of its own for each kind."""
    weights = {"w": jax.random.normal(jax.random.key(1), (5, 4)), "e": jnp.linspace(-1, 1, 8)}

    def run(w: Any, state: Any, x: Any) -> Any:
        def step(c: Any, x: Any) -> Any:
            drive = x["audio"] @ w["w"] * x["gain"].astype(jnp.float32)[:, None]
            drive = drive + w["e"][x["keys"].astype(jnp.int32)].sum(-1)[:, None]
            turned = jnp.real(x["spin"] * jnp.conj(c["spin"])).sum(-1)
            trace = jnp.where(x["talk"][:, None], 0.5 * c["trace"] + drive, c["trace"] * 0.9)
            after = {"trace": trace, "spin": x["spin"], "n": c["n"] + x["talk"].astype(jnp.int32)}
            return after, {"trace": jnp.tanh(trace), "turned": turned, "n": after["n"]}

        return jax.lax.scan(step, state, x)

    def start(batch: int) -> Any:
        return {
            "trace": jnp.zeros((batch, 4)),
            "spin": jnp.ones((batch, 2), jnp.complex64),
            "n": jnp.zeros(batch, jnp.int32),
        }

    return models.carry(
        run, start, weights, frame=FRAME, sample_shape=SHAPES, dtype=DTYPES, outputs=outputs
    )


@pytest.fixture(scope="module")
def model() -> StreamModel:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return several()


@pytest.fixture(autouse=True)
def _as_people_have_them() -> Any:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def frames_of(n: int, seed: int, steps: int = FRAME) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "audio": rng.normal(size=(steps, 5)).astype(np.float32),
            "gain": rng.uniform(0.5, 2, steps).astype(ml_dtypes.bfloat16),
            "keys": rng.integers(0, 8, (steps, 3)).astype(np.int16),
            "spin": (rng.normal(size=(steps, 2)) + 1j * rng.normal(size=(steps, 2))).astype(
                np.complex64
            ),
            "talk": rng.random(steps) < 0.6,
        }
        for _ in range(n)
    ]


def served(model: StreamModel, frames: list[dict[str, Any]]) -> list[Any]:
    """By the engine's own server, alone."""
    if id(model) not in _servers:
        # In the row count that the workers use: others may round otherwise.
        _servers[id(model)] = StreamServer(model, slots=4, row_counts=(4,))
    server = _servers[id(model)]
    session = server.open()
    futures = [server.submit(session, frame) for frame in frames]
    server.run()
    server.close(session)
    return [future.result() for future in futures]


_servers: dict[int, StreamServer] = {}
"""By model, which each keeps alive: preparing one takes seconds."""


def assert_same(got: Any, expected: Any) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        assert got[name].shape == array.shape
        assert got[name].tobytes() == np.asarray(array).tobytes(), name


# Bytes and back


def test_the_wires_packing_is_the_engines() -> None:
    names = {name: (np.dtype(DTYPES[name]).name, shape) for name, shape in SHAPES.items()}
    wire = NamedFrames(names, FRAME)
    inputs = engine_inputs.inputs_of(SHAPES, DTYPES)
    frames = frames_of(4, seed=2)
    raws = [wire.encode(frame) for frame in frames]
    assert {len(raw) for raw in raws} == {wire.size}
    blocks, others = wire.many(raws)
    assert not others.any()
    for raw, block, frame in zip(raws, blocks, frames, strict=True):
        assert raw == encode(dict(sorted(frame.items())))
        assert block.tobytes() == engine_inputs.pack(inputs, frame).tobytes()
        assert block.tobytes() == wire.read(raw)[0] == wire.payload(raw)
        assert wire.usual(block.tobytes()) == raw
        assert_same(wire.decode(raw), dict(sorted(frame.items())))
        unpacked = engine_inputs.unpack(inputs, jnp.asarray(block)[:, None])
        assert_same(
            {n: np.asarray(a)[:, 0] for n, a in unpacked.items()}, dict(sorted(frame.items()))
        )


def test_any_other_valid_encoding_of_a_named_frame_is_read() -> None:
    wire = NamedFrames({"a": ("float32", (2,)), "b": ("bool", ())}, 2)
    a, b = np.float32([[1, 2], [3, 4]]), np.array([True, False])
    usual = wire.encode({"a": a, "b": b})
    turned = encode({"b": b, "a": a})
    assert turned != usual
    assert wire.read(turned) == wire.read(usual)
    _, others = wire.many([usual, turned])
    assert others.tolist() == [False, True] or others.all()


A, B = np.zeros((2, 2), np.float32), np.zeros(2, bool)


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        ({"a": A}, "shape", "a map of a float32.*b bool"),
        ({"a": A, "c": B}, "shape", r"got \['a', 'c'\]"),
        (A, "shape", "got one array"),
        ({"a": np.zeros((2, 3), np.float32), "b": B}, "shape", "input a"),
        ({"a": A, "b": B[:1]}, "shape", "one number of steps"),
        ({"a": A.astype(float), "b": B}, "dtype", "float32, got float64"),
    ],
)
def test_what_is_no_frame_of_the_inputs_is_named(value: Any, code: str, words: str) -> None:
    wire = NamedFrames({"a": ("float32", (2,)), "b": ("bool", ())}, 2)
    with pytest.raises(BadFrame, match=words) as caught:
        wire.read(encode(value))
    assert caught.value.code == code


# Served


def test_a_model_of_several_inputs_is_served_through_redis(redis_url, thread_worker, model) -> None:
    worker = thread_worker(model, slots=8, row_counts=(4,))
    streams = {f"s{k}": frames_of(5, seed=10 + k) for k in range(6)}
    with Client(redis_url) as client:
        sessions = {name: client.open(name) for name in streams}
        for n in range(5):
            for name, session in sessions.items():
                session.push(streams[name][n], end=n == 4)
        got = {name: [r.output for r in s.replies(30)] for name, s in sessions.items()}
        config = client.app.config()
    assert json.loads(config["inputs"])["gain"] == {"dtype": "bfloat16", "shape": []}
    assert "sample_shape" not in config
    for name, frames in streams.items():
        expected = served(model, frames)
        assert len(got[name]) == len(expected)
        for a, b in zip(got[name], expected, strict=True):
            assert_same(a, b)
    assert worker.error is None


def test_a_bad_named_frame_is_answered_and_nothing_of_it_remains(redis_url, thread_worker, model):
    thread_worker(model, slots=8, row_counts=(4,))
    frames = frames_of(3, seed=3)
    with Client(redis_url) as client:
        session = client.open("s")
        session.push(frames[0])
        assert next(session.replies(30)).error is None
        with pytest.raises(BadFrame, match="a frame is a map of audio"):
            session.push({"audio": frames[1]["audio"]})
        raw = encode({**frames[1], "audio": frames[1]["audio"][:, :4].copy()})
        session._append({"frame": raw}, 10)
        assert next(session.replies(30)).error.code == "shape"
        session.push(frames[2], end=True)
        last = list(session.replies(30))[-1]
    assert_same(last.output, served(model, [frames[0], frames[2]])[1])


def test_finite_values_only_holds_for_each_input(redis_url, thread_worker, model) -> None:
    thread_worker(model, slots=8, row_counts=(4,), finite=True)
    good, bad = frames_of(2, seed=4)
    bad["spin"][2, 1] = complex(0, np.nan)
    with Client(redis_url) as client:
        session = client.open("s")
        session.push(bad)
        session.push(good, end=True)
        first, second = list(session.replies(30))
    assert first.error.code == "not_finite"
    assert_same(second.output, served(model, [good])[0])


# Short last frames


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("reset", [False, True])
def test_a_last_frame_may_be_short_and_its_outputs_are_cut(
    redis_url, thread_worker, model, steps, reset
) -> None:
    thread_worker(model, slots=8, row_counts=(4,))
    frames = frames_of(3, seed=5)
    tail = frames_of(1, seed=6, steps=steps)[0]
    rest = frames_of(1, seed=7, steps=FRAME)[0]
    padded = {n: np.concatenate([a, rest[n][steps:]]) for n, a in tail.items()}
    whole = served(model, [*([] if reset else frames), padded])[-1]
    with Client(redis_url) as client:
        session, other = client.open("s"), client.open("other")
        for frame in frames:
            session.push(frame)
        if reset:
            raw = client.app.encode(tail, last=True)
            session._append({"op": "reset", "frame": raw, "end": "1"}, 10)
        else:
            session.push(tail, end=True)
        other.push(rest, end=True)
        replies = list(session.replies(30))
        assert_same(next(iter(other.replies(30))).output, served(model, [rest])[0])
    assert len(replies) == 4
    assert_same(replies[-1].output, {name: y[:steps] for name, y in whole.items()})


def test_a_short_frame_that_is_not_the_last_is_refused_with_what_to_do(
    redis_url, thread_worker, model
) -> None:
    thread_worker(model, slots=8, row_counts=(4,))
    frames = frames_of(2, seed=5)
    short = frames_of(1, seed=6, steps=2)[0]
    with Client(redis_url) as client:
        session = client.open("s")
        with pytest.raises(BadFrame, match="audio"):
            session.push(short)
        session.push(frames[0])
        session._append({"frame": encode(short)}, 10)
        session.push(frames[1], end=True)
        first, second, third = list(session.replies(30))
    assert second.error.code == "shape"
    assert "one of fewer is the last of its session, and comes with end = 1" in str(second.error)
    a, b = served(model, frames)
    assert_same(first.output, a)
    assert_same(third.output, b)


def gru(outputs: Any) -> StreamModel:
    import flax.linen as nn

    cell = nn.GRUCell(5)
    variables = cell.init(jax.random.key(0), jnp.zeros((1, 5)), jnp.zeros((1, 3)))
    return models.rnn(cell, variables, frame=FRAME, sample_shape=(3,), outputs=outputs)


REDUCED = {
    "last": lambda y: y[-1],
    "mean": lambda y: y.mean(0, dtype=np.float32),
    "sum": lambda y: y.sum(0, dtype=np.float32),
    "max": lambda y: y.max(0),
    "sum argmax": lambda y: y.sum(0).argmax(-1).astype(np.int32),
    "argmax": lambda y: y.argmax(-1).astype(np.int32),
}


@pytest.mark.parametrize("pick", REDUCED)
def test_what_is_picked_of_a_short_frame_is_made_of_its_real_steps(
    redis_url, thread_worker, pick
) -> None:
    thread_worker(gru(pick), slots=4, row_counts=(4,))
    rng = np.random.default_rng(8)
    stream = (rng.normal(size=(2 * FRAME + 4, 3)) - 1).astype(np.float32)
    whole = StreamServer(gru("all"), slots=4, row_counts=(4,))
    session = whole.open()
    padded = np.concatenate([stream, rng.normal(size=(2, 3)).astype(np.float32)])
    futures = [whole.submit(session, f) for f in padded.reshape(3, FRAME, 3)]
    whole.run()
    steps = [f.result() for f in futures]
    with Client(redis_url) as client:
        served = client.open("s")
        served.push(stream[:FRAME])
        served.push(stream[FRAME : 2 * FRAME])
        served.push(stream[2 * FRAME :], end=True)
        replies = list(served.replies(30))
    for reply, y in zip(replies, [steps[0], steps[1], steps[2][:4]], strict=True):
        expected = REDUCED[pick](y)
        assert (reply.output.shape, reply.output.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(reply.output, expected, rtol=1e-6, atol=1e-7)


def test_a_function_that_is_not_told_of_the_steps_gets_whole_frames_only(
    redis_url, thread_worker
) -> None:
    thread_worker(gru(lambda y: y.mean(0)), slots=4, row_counts=(4,))
    with Client(redis_url) as client:
        session = client.open("s")
        session.push(np.ones((FRAME, 3), np.float32))
        session.push(np.ones((2, 3), np.float32), end=True)
        first, second = list(session.replies(30))
    assert first.output.shape == (5,)
    assert second.error.code == "shape"
    assert "made of whole frames" in str(second.error)


def test_a_function_may_be_told_of_the_steps(redis_url, thread_worker) -> None:
    def first_and_count(y: Any, steps: Any) -> Any:
        return {"first": y[0], "steps": steps}

    thread_worker(gru(first_and_count), slots=4, row_counts=(4,))
    with Client(redis_url) as client:
        session = client.open("s")
        session.push(np.ones((FRAME, 3), np.float32))
        session.push(np.ones((2, 3), np.float32), end=True)
        replies = list(session.replies(30))
    assert [int(r.output["steps"]) for r in replies] == [FRAME, 2]
    assert replies[0].output["first"].shape == (5,)


def test_inputs_that_cannot_be_are_refused() -> None:
    def run(w: Any, c: Any, x: Any) -> Any:
        return c, x["a"]

    with pytest.raises(CannotStream, match="takes no inputs"):
        models.carry(run, lambda _: {}, {}, frame=2, sample_shape={})
    with pytest.raises(CannotStream, match="input a, takes frames of float64"):
        models.carry(run, lambda _: {}, {}, frame=2, sample_shape={"a": (2,)}, dtype="float64")
    with pytest.raises(ValueError, match="sample_shape names a, and dtype b"):
        models.carry(run, lambda _: {}, {}, frame=2, sample_shape={"a": (2,)}, dtype={"b": "int8"})
