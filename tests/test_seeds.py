"""Randomness is state: a key a session, from its id and a seed, whoever serves it."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slotstream import Client
from slotstream_worker import CannotStream, StreamModel, models
from slotstream_worker.engine.comparison import compare
from slotstream_worker.engine.engine import Engine
from slotstream_worker.engine.seeds import key_of, started

FRAME = 3


def noisy(w: Any, state: Any, x: Any) -> Any:
    """One time step of one example: a leaky trace with noise, some of it dropped."""
    key, own = jax.random.split(jax.random.wrap_key_data(state["net"]["key"]))
    a, b = jax.random.split(own)
    trace = w["decay"] * state["trace"] + x + 0.1 * jax.random.normal(a, (4,), jnp.float32)
    kept = jnp.where(jax.random.bernoulli(b, 0.7, (4,)), trace, jnp.float32(0))
    return {"trace": trace, "net": {"key": jax.random.key_data(key)}}, kept


REST = {"trace": jnp.full(4, 0.5, jnp.float32), "net": {"key": jnp.zeros(2, jnp.uint32)}}
WEIGHTS = {"decay": jnp.float32([0.5, 0.7, 0.9, 0.95])}


def build(key: str = "net.key", seed: int = 11, **more: Any) -> StreamModel:
    return models.example(
        noisy, REST, WEIGHTS, frame=FRAME, sample_shape=(4,), per_step=True, key=key, seed=seed,
        **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model() -> StreamModel:
    return build()


@pytest.fixture(scope="module")
def engine(model: StreamModel) -> Engine:
    engine = Engine(model, slots=6)
    engine.prepare((1, 4))
    return engine


def whole(model: StreamModel, session: str, stream: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """One call over a stream `[frames, frame, 4]`, by JAX alone, from the session's own key."""
    state = {**REST, "net": {"key": jnp.asarray(key_of(11, session))}}
    _, ys = jax.lax.scan(lambda s, x: noisy(WEIGHTS, s, x), state, stream.reshape(-1, 4))
    return np.asarray(ys).reshape(len(stream), FRAME, 4)


def frames(n: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=(n, FRAME, 4)).astype(np.float32)


def by_session(ran: Any) -> dict[Any, np.ndarray[Any, Any]]:
    """Outputs of a round, of however many launches it was made."""
    return {s: y for one in ran for s, y in zip(one.sessions, one.outputs["output"], strict=True)}


def test_a_key_is_drawn_from_seed_and_id_as_it_is_written() -> None:
    digest = hashlib.sha256(b"11:mic-7").digest()
    a, b = (int.from_bytes(digest[k : k + 4], "little") for k in (0, 4))
    assert key_of(11, "mic-7").tolist() == [a, b]
    assert len({tuple(key_of(s, n)) for s in (0, 11) for n in ("a", "b", "mic-7")}) == 6


def test_sessions_draw_each_their_own_and_the_same_again(engine: Engine, model) -> None:
    stream = frames(4, seed=1)
    found = {}
    for name in ("a", "b", "a"):  # the second `a` is a session of its own, under the same id
        engine.pool.admit([name])
        outputs = [engine.run([name], f[None])[0].outputs["output"][0] for f in stream]
        engine.pool.release([name])
        found.setdefault(name, []).append(np.stack(outputs))
    assert found["a"][0].tobytes() == found["a"][1].tobytes()
    assert (found["a"][0] != found["b"][0]).any()
    for name, (first, *_) in found.items():
        np.testing.assert_allclose(first, whole(model, name, stream), rtol=1e-5, atol=1e-6)


def test_served_in_company_is_bitwise_and_a_whole_call_starts_from_the_same_key(engine) -> None:
    company, direct = compare(engine)
    assert company.bitwise
    assert direct.largest < 1e-5 * direct.scale


def test_a_reset_starts_from_the_same_key_and_one_that_fails_changes_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, stream = engine.pool, frames(3, seed=2)
    pool.admit(["a", "b"])
    first = by_session(engine.run(["a", "b"], stream[:2]))
    engine.run(["a", "b"], stream[1:])
    before = pool.read(["a", "b"])
    advance = engine.launcher._advance
    monkeypatch.setattr(engine.launcher, "_advance", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.run(["a", "b"], stream[:2], from_rest={"a"})
    assert pool.read(["a", "b"]) == before
    monkeypatch.setattr(engine.launcher, "_advance", advance)
    again = by_session(engine.run(["a", "b"], stream[:2], from_rest={"a"}))
    assert again["a"].tobytes() == first["a"].tobytes()
    assert again["b"].tobytes() != first["b"].tobytes()
    pool.reset("b")
    assert (
        started(pool.spec, pool.read(["b"])[0])["net"]["key"][0].tolist()
        == key_of(11, "b").tolist()
    )
    pool.release(["a", "b"])


def test_a_row_that_a_round_starts_anew_is_known_until_the_round_is_over(engine: Engine) -> None:
    """What is read of it meanwhile is no state after any answer: no checkpoint is made of it."""
    pool, stream = engine.pool, frames(3, seed=4)
    pool.admit(["a", "b"])
    engine.run(["a", "b"], stream[:2])
    flight = engine.begin(["a", "b"], stream[:2], from_rest={"a"})
    assert engine.restarting == {"a"}
    engine.finish(flight)
    assert engine.restarting == set()
    before = pool.read(["a", "b"])
    # Run again in parts, none of them is started anew but those that it is asked for and that run.
    (ran,) = engine.isolate(["b"], stream[:1], from_rest={"a", "gone"})
    assert ran.sessions == ("b",)
    assert pool.read(["a"]) == before[:1]
    pool.release(["a", "b"])


def test_another_worker_draws_on_where_the_first_stopped(redis_url, thread_worker, model) -> None:
    """More sessions than slots, parked and seated; a hand-over in between; a reset by the wire."""
    streams = {f"s{k}": frames(6, seed=20 + k) for k in range(5)}
    settings = {"slots": 2, "max_sessions": 8, "row_counts": (2,)}
    first = thread_worker(model, **settings)
    got: dict[str, list[Any]] = {name: [] for name in streams}
    with Client(redis_url) as client:
        sessions = {name: client.open(name) for name in streams}
        for n in range(6):
            if n == 3:
                first.drain()
                thread_worker(model, **settings)
            for name, session in sessions.items():
                session.push(streams[name][n], end=False)
            for name, session in sessions.items():
                got[name].append(next(session.replies(30)).output)
        sessions["s0"].reset(streams["s0"][0])
        restarted = next(sessions["s0"].replies(30)).output
    for name, outputs in got.items():
        expected = whole(model, name, streams[name])
        np.testing.assert_allclose(np.stack(outputs), expected, rtol=1e-5, atol=1e-6)
    assert restarted.tobytes() == got["s0"][0].tobytes()


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("rng", "no leaf 'rng' for the random key; it has net.key, trace"),
        ("trace", r"uint32\[2\].*'trace' is float32\[4\]"),
    ],
)
def test_a_key_that_is_none_is_refused_and_named(key: str, words: str) -> None:
    with pytest.raises(CannotStream, match=words):
        build(key=key)


def test_a_typed_key_is_refused_with_what_to_keep_instead() -> None:
    def step(w: Any, state: Any, x: Any) -> Any:
        return state, x

    with pytest.raises(CannotStream, match=r"jax\.random\.key_data"):
        models.example(
            step,
            {"key": jax.random.key(0)},
            jnp.float32(1),
            frame=2,
            sample_shape=(),
            per_step=True,
        )
