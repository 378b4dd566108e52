"""Models as people have them: served in company, against the package's own call over a stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from slotstream_worker import CannotStream, StreamModel, StreamServer, models
from slotstream_worker.engine.pool import Pool

FRAME, STREAMS = 5, (4, 2, 5, 1, 3)
KEY = jax.random.key(3)


@pytest.fixture(autouse=True)
def _compile_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and forks are not used here."""
    monkeypatch.setattr(Pool, "warm", lambda _: None)


@pytest.fixture(autouse=True)
def _as_people_have_them() -> Iterator[None]:
    """Models in the wild rely on JAX's implicit promotions, which this suite else forbids."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@dataclass
class Case:
    """A served model, and the package's own call: `[steps, *sample]` to `[steps, ...]`."""

    model: StreamModel
    whole: Callable[[Any], Any]


def linen_cell(cell: Any, sample: tuple[int, ...] = (6,)) -> Case:
    carry = cell.initialize_carry(KEY, (1, *sample))
    variables = cell.init(KEY, carry, jnp.zeros((1, *sample)))
    whole = nn.RNN(cell)

    def run(stream: Any) -> Any:
        return whole.apply({"params": {"cell": variables["params"]}}, stream[None])[0]

    return Case(models.rnn(cell, variables, frame=FRAME, sample_shape=sample), run)


def linen_rnn() -> Case:
    rnn = nn.RNN(nn.OptimizedLSTMCell(7), unroll=2)
    variables = rnn.init(KEY, jnp.zeros((1, 4, 6)))
    return Case(
        models.rnn(rnn, variables, frame=FRAME, sample_shape=(6,)),
        lambda stream: rnn.apply(variables, stream[None])[0],
    )


def nnx_cell(kind: Any) -> Case:
    cell = kind(6, 7, rngs=nnx.Rngs(4))

    def whole(stream: Any) -> Any:
        # Made in here: an nnx module belongs to the trace it is made in.
        return nnx.RNN(kind(6, 7, rngs=nnx.Rngs(4)))(stream[None], rngs=nnx.Rngs(0))[0]

    return Case(models.rnn(cell, frame=FRAME, sample_shape=(6,)), whole)


class Tagger(nn.Module):
    """Two RNNs and a head, batch first, as people write it; nothing in it knows of streaming."""

    @nn.compact
    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        h = nn.RNN(nn.GRUCell(8))(x)
        carry, h = nn.RNN(nn.LSTMCell(5), return_carry=True)(nn.relu(nn.Dense(6)(h)))
        del carry
        return {"tags": nn.log_softmax(nn.Dense(3)(h)), "energy": jnp.sum(h**2, -1)}


def linen_module() -> Case:
    module = Tagger()
    variables = module.init(KEY, jnp.zeros((1, 4, 6)))
    return Case(
        models.linen(module, variables, frame=FRAME, sample_shape=(6,), batch_major=True),
        lambda stream: jax.tree.map(lambda y: y[0], module.apply(variables, stream[None])),
    )


class NnxTagger(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.RNN(nnx.GRUCell(6, 8, rngs=rngs))
        self.layers = nnx.List(
            [nnx.RNN(nnx.LSTMCell(8, 5, rngs=rngs)), nnx.Linear(5, 3, rngs=rngs)]
        )
        self.drop = nnx.Dropout(0.4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.drop(self.first(x))
        for layer in self.layers:
            h = layer(h)
        return h


def nnx_module() -> Case:
    def whole(stream: Any) -> Any:
        module = NnxTagger(nnx.Rngs(5))
        module.eval()
        return module(stream[None])[0]

    module = NnxTagger(nnx.Rngs(5))
    return Case(models.nnx(module, frame=FRAME, sample_shape=(6,), batch_major=True), whole)


class Trace(nnx.Variable):
    pass


class Filter(nnx.Module):
    """Keeps a trace and how many steps it has seen, in Variables; a table that it only reads."""

    def __init__(self, rngs: nnx.Rngs, batch: int = 1) -> None:
        self.mix = nnx.Linear(6, 6, rngs=rngs)
        self.scale = nnx.BatchStat(jnp.linspace(0.5, 1.5, 6))
        self.trace = Trace(jnp.full((batch, 6), 0.25))
        self.seen = Trace(jnp.zeros((batch,), jnp.int32))

    def __call__(self, frames: jax.Array) -> jax.Array:
        def step(carry: Any, x: jax.Array) -> Any:
            trace = 0.8 * carry + self.mix(x) * self.scale.get_value()[None]
            return trace, jnp.tanh(trace)

        last, ys = jax.lax.scan(step, self.trace.get_value(), frames)
        self.trace.set_value(last)
        self.seen.set_value(self.seen.get_value() + frames.shape[0])
        return ys * (1 + 0 * self.seen.get_value()[None, :, None])


def nnx_variables() -> Case:
    return Case(
        models.nnx(Filter(nnx.Rngs(6)), frame=FRAME, sample_shape=(6,)),
        lambda stream: Filter(nnx.Rngs(6))(stream[:, None])[:, 0],
    )


def equinox_cell(kind: Any, state: Any) -> Case:
    cell = kind(6, 7, key=KEY)

    def whole(stream: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            h = cell(x, h)
            return h, h[0] if isinstance(h, tuple) else h

        return jax.lax.scan(step, state, stream)[1]

    return Case(models.equinox(cell, state, frame=FRAME, sample_shape=(6,)), whole)


def odd_state() -> Case:
    """One example, a state of a scalar flag, a counter, complex numbers and nothing."""
    weights = {
        "lam": jnp.exp(1j * jnp.linspace(0.1, 2.0, 4)) * 0.95,
        "b": jax.random.normal(KEY, (6, 4)) + 1j * jax.random.normal(jax.random.key(8), (6, 4)),
    }
    start = {
        "z": jnp.zeros(4, jnp.complex64),
        "n": jnp.int32(0),
        "seen": jnp.bool_(False),
        "x": None,
    }

    def step(w: Any, state: Any, x: Any) -> Any:
        z = jnp.where(state["seen"], w["lam"] * state["z"], 0) + x @ w["b"]
        n = state["n"] + 1
        after = {"z": z.astype(jnp.complex64), "n": n, "seen": n % 7 != 0, "x": None}
        return after, {"z": z, "real": z.real / n, "n": n}

    def whole(stream: Any) -> Any:
        return jax.lax.scan(lambda s, x: step(weights, s, x), start, stream)[1]

    return Case(
        models.example(step, start, weights, frame=FRAME, sample_shape=(6,), per_step=True), whole
    )


def several_caches() -> Case:
    """A state-space layer as Mamba-2 keeps it: a window of inputs and the state, each its own."""
    w = {
        "conv": jax.random.normal(KEY, (4, 6)),
        "a": -jnp.exp(jnp.linspace(-1, 1, 6)),
        "bc": jax.random.normal(jax.random.key(9), (6, 2 * 3)) / 3,
    }

    def run(w: Any, caches: Any, frames: Any) -> Any:
        def step(c: Any, x: Any) -> Any:
            window = jnp.concatenate([c["conv"][1:], x[None]])
            u = jax.nn.silu(jnp.einsum("kbd,kd->bd", window, w["conv"]))
            b, read = jnp.split(u @ w["bc"], 2, -1)
            dt = jax.nn.softplus(u)
            ssm = jnp.exp(dt * w["a"])[..., None] * c["ssm"] + (dt * u)[..., None] * b[:, None]
            return {"conv": window, "ssm": ssm}, jnp.einsum("bdn,bn->bd", ssm, read)

        return jax.lax.scan(step, caches, frames)

    def start(batch: int) -> Any:
        return {"conv": jnp.zeros((4, batch, 6)), "ssm": jnp.zeros((batch, 6, 3))}

    return Case(
        models.carry(run, start, w, frame=FRAME, sample_shape=(6,)),
        lambda stream: run(w, start(1), stream[:, None])[1][:, 0],
    )


CASES: dict[str, Callable[[], Case]] = {
    "linen SimpleCell": lambda: linen_cell(nn.SimpleCell(7)),
    "linen GRUCell": lambda: linen_cell(nn.GRUCell(7)),
    "linen MGUCell": lambda: linen_cell(nn.MGUCell(7)),
    "linen LSTMCell": lambda: linen_cell(nn.LSTMCell(7)),
    "linen OptimizedLSTMCell": lambda: linen_cell(nn.OptimizedLSTMCell(7)),
    "linen ConvLSTMCell": lambda: linen_cell(nn.ConvLSTMCell(3, (3, 3)), (5, 4, 2)),
    "linen RNN": linen_rnn,
    "linen module with RNNs": linen_module,
    "nnx SimpleCell": lambda: nnx_cell(nnx.SimpleCell),
    "nnx GRUCell": lambda: nnx_cell(nnx.GRUCell),
    "nnx LSTMCell": lambda: nnx_cell(nnx.LSTMCell),
    "nnx OptimizedLSTMCell": lambda: nnx_cell(nnx.OptimizedLSTMCell),
    "nnx module with RNNs": nnx_module,
    "nnx Variables": nnx_variables,
    "equinox GRUCell": lambda: equinox_cell(eqx.nn.GRUCell, jnp.zeros(7)),
    "equinox LSTMCell": lambda: equinox_cell(eqx.nn.LSTMCell, (jnp.zeros(7), jnp.zeros(7))),
    "flags, counters, complex": odd_state,
    "several caches": several_caches,
}


@functools.cache
def case_of(name: str) -> Case:
    return CASES[name]()


_servers: dict[int, StreamServer] = {}


def server_of(model: StreamModel) -> StreamServer:
    """One server a model, which it keeps alive: each compiles for seconds."""
    if id(model) not in _servers:
        _servers[id(model)] = StreamServer(model, slots=3, row_counts=(8,))
    return _servers[id(model)]


def interleaved(model: StreamModel, streams: list[Any], seed: int = 0) -> list[Any]:
    """Outputs of each stream, served in random company; sessions come and go."""
    server = server_of(model)
    rng = np.random.default_rng(seed)
    waiting = [(k, list(stream)) for k, stream in enumerate(streams)]
    found: list[list[Any]] = [[] for _ in streams]
    here: dict[int, tuple[int, list[Any]]] = {}
    while waiting or here:
        while waiting and len(here) < 3:
            here[server.open()] = waiting.pop(0)
        futures = {}
        for session, (k, frames) in here.items():
            if rng.random() < 0.7:
                futures[k] = server.submit(session, frames.pop(0))
        server.run()
        for k, future in futures.items():
            found[k].append(future.result())
        for session in [s for s, (_, frames) in here.items() if not frames]:
            server.close(session)
            del here[session]
    return found


def streams_of(model: StreamModel, seed: int = 1) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n, *model.frame_shape)).astype(model.dtype) for n in STREAMS]


@pytest.mark.parametrize("name", CASES)
def test_served_sessions_give_what_the_packages_own_call_gives(name: str) -> None:
    """To rounding, since the package compiles another program; in any company to the bit."""
    case = case_of(name)
    streams = streams_of(case.model)
    whole = jax.jit(case.whole)
    found = interleaved(case.model, streams, seed=3)
    for stream, frames in zip(streams, found, strict=True):
        served = jax.tree.map(lambda *parts: np.concatenate(parts), *frames)
        # Zeros behind its end save a compilation for every length.
        padded = np.zeros((max(STREAMS), *stream.shape[1:]), stream.dtype)
        padded[: len(stream)] = stream
        outputs = whole(jnp.asarray(padded.reshape(-1, *case.model.sample_shape)))
        steps = slice(len(stream) * FRAME)
        expected = jax.tree.map(lambda y, steps=steps: np.asarray(y)[steps], outputs)
        assert jax.tree.structure(served) == jax.tree.structure(expected)
        for got, want in zip(jax.tree.leaves(served), jax.tree.leaves(expected), strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            if want.dtype.kind in "biu":
                np.testing.assert_array_equal(got, want)
            else:
                np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    again = interleaved(case.model, streams[::-1], seed=4)[::-1]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        assert a.tobytes() == b.tobytes()


# What is refused, and in which words


def test_what_looks_ahead_is_refused_and_named() -> None:
    backwards = nn.RNN(nn.GRUCell(3), reverse=True)
    with pytest.raises(CannotStream, match="runs backwards from a stream's end"):
        models.rnn(backwards, {}, frame=4, sample_shape=(2,))

    class Both(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Bidirectional(nn.RNN(nn.GRUCell(3)), nn.RNN(nn.GRUCell(3)))(x)

    variables = Both().init(KEY, jnp.zeros((1, 4, 2)))
    with pytest.raises(CannotStream, match="runs backwards"):
        models.linen(Both(), variables, frame=4, sample_shape=(2,), batch_major=True)


def test_an_rnn_that_is_called_twice_a_frame_is_refused() -> None:
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            rnn = nn.RNN(nn.GRUCell(2))
            return rnn(rnn(x))

    variables = Twice().init(KEY, jnp.zeros((1, 4, 2)))
    with pytest.raises(CannotStream, match="called more than once a frame"):
        models.linen(Twice(), variables, frame=4, sample_shape=(2,), batch_major=True)


def test_variables_are_asked_for_where_they_are_needed_and_only_there() -> None:
    with pytest.raises(TypeError, match="linen GRUCell is served with variables"):
        models.rnn(nn.GRUCell(3), frame=4, sample_shape=(2,))
    with pytest.raises(TypeError, match="holds its variables itself"):
        models.rnn(nnx.GRUCell(2, 3, rngs=nnx.Rngs(0)), {}, frame=4, sample_shape=(2,))


def test_nnx_state_without_a_row_of_its_own_is_refused_and_named() -> None:
    with pytest.raises(CannotStream, match=r"(seen|trace).*\[3.*leaves \[1, \.\.\.\]"):
        models.nnx(Filter(nnx.Rngs(1), batch=3), frame=4, sample_shape=(6,))


def test_nnx_state_may_be_put_at_rest_by_a_function() -> None:
    def rest(module: Filter, batch: int) -> None:
        module.trace.set_value(jnp.full((batch, 6), 0.25))
        module.seen.set_value(jnp.zeros((batch,), jnp.int32))

    model = models.nnx(Filter(nnx.Rngs(6), batch=3), frame=FRAME, sample_shape=(6,), rest=rest)
    plain = case_of("nnx Variables").model
    streams = streams_of(model)
    for a, b in zip(interleaved(model, streams), interleaved(plain, streams), strict=True):
        assert [x.tobytes() for x in a] == [x.tobytes() for x in b]


def test_an_nnx_module_with_dropout_has_weights_that_can_be_named() -> None:
    """Its random streams hold keys, which have no bytes, and are no weights."""
    name = models.nnx(NnxTagger(nnx.Rngs(5)), frame=FRAME, sample_shape=(6,), batch_major=True)
    other = models.nnx(NnxTagger(nnx.Rngs(6)), frame=FRAME, sample_shape=(6,), batch_major=True)
    assert name.weights != other.weights
    leaves = jax.tree.leaves(name.variables)
    assert all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves)


@pytest.mark.parametrize("name", ["nnx module with RNNs", "nnx Variables", "nnx LSTMCell"])
def test_several_frames_of_an_nnx_module_run_in_one_launch(name: str) -> None:
    """A backlog is caught up in a scan over frames: nnx refuses Variables made outside of it."""
    model = case_of(name).model
    frames = jnp.asarray(streams_of(model)[2])[:, :, None]  # [5, frame, 1, 6]

    def one(weights: Any, state: Any, frame: Any) -> Any:
        outputs, state = model.apply(weights, state, frame)
        return state, outputs

    run = jax.jit(model.apply)
    _, state = run(model.variables, None, frames[0])
    later = jax.jit(
        lambda weights, state, rest: jax.lax.scan(functools.partial(one, weights), state, rest)
    )(model.variables, state, frames[1:])[1]
    alone = []
    for frame in frames[1:]:
        outputs, state = run(model.variables, state, frame)
        alone.append(outputs)
    np.testing.assert_allclose(later, np.stack(alone), rtol=1e-6, atol=1e-7)


# What a reply carries


@pytest.mark.parametrize(
    ("pick", "expected"),
    [
        ("all", lambda y: y),
        ("last", lambda y: y[-1]),
        ("mean", lambda y: y.mean(0)),
        ("sum", lambda y: y.sum(0)),
        ("max", lambda y: y.max(0)),
        ("argmax", lambda y: y.argmax(-1).astype(np.int32)),
        ("sum argmax", lambda y: y.sum(0).argmax(-1).astype(np.int32)),
        (
            lambda y: {"top": y.max(), "first": y[0, :2]},
            lambda y: {"top": y.max(), "first": y[0, :2]},
        ),
    ],
    ids=["all", "last", "mean", "sum", "max", "argmax", "sum argmax", "function"],
)
def test_a_reply_carries_what_was_picked(pick: Any, expected: Any) -> None:
    cell = nn.GRUCell(7)
    whole = case_of("linen GRUCell").model
    variables = whole.variables
    model = models.rnn(cell, variables, frame=FRAME, sample_shape=(6,), outputs=pick)
    streams = streams_of(model)
    for a, b in zip(interleaved(model, streams), interleaved(whole, streams), strict=True):
        for got, y in zip(a, b, strict=True):
            want = expected(y)
            assert jax.tree.structure(got) == jax.tree.structure(want)
            for name, one in jax.tree_util.tree_leaves_with_path(want):
                found = dict(jax.tree_util.tree_leaves_with_path(got))[name]
                np.testing.assert_allclose(found, one, rtol=1e-6, atol=1e-7)
                assert np.shape(found) == np.shape(one)


def test_outputs_are_picked_by_name() -> None:
    module = Tagger()
    variables = module.init(KEY, jnp.zeros((1, 4, 6)))
    model = models.linen(
        module,
        variables,
        frame=FRAME,
        sample_shape=(6,),
        batch_major=True,
        outputs={"tags": "mean argmax"},
    )
    assert [(o.name, o.shape, o.dtype) for o in model.outputs] == [("tags", (), np.int32)]
    with pytest.raises(CannotStream, match=r"no output 'tag'; it has .*tags"):
        models.linen(
            module,
            variables,
            frame=FRAME,
            sample_shape=(6,),
            batch_major=True,
            outputs={"tag": "last"},
        )


def test_a_word_that_is_no_pick_is_refused_with_those_that_are() -> None:
    cell = nn.GRUCell(7)
    variables = cell.init(KEY, jnp.zeros((1, 7)), jnp.zeros((1, 6)))
    with pytest.raises(ValueError, match=r"all, last, mean, sum, max, argmax.*got 'median'"):
        models.rnn(cell, variables, frame=FRAME, sample_shape=(6,), outputs="median")
