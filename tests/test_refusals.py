"""A model that cannot stream is refused when it is built, with the reason; its neighbours are not.

Each refusal is paired, where there is one, with the nearest model that does stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving_models import LI, LIF, linen_model
from slotstream_worker import CannotStream, StreamModel, StreamServer, models
from slotstream_worker.engine.engine import Engine

FRAME, WIDTH = 5, 3
Step = Callable[[Any, Any, jax.Array], Any]


def plain(call: Callable[[jax.Array], Any], **settings: Any) -> StreamModel:
    """A linen module around a function of the frames, without state or weights."""

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> Any:
            return call(x)

    settings = {"frame": FRAME, "sample_shape": (WIDTH,), **settings}
    return models.linen(Plain(), {}, **settings)


def carried(step: Step, start: Any, variables: Any = (), **settings: Any) -> StreamModel:
    settings = {"frame": FRAME, "sample_shape": (WIDTH,), **settings}
    return models.carry(step, start, variables, **settings)


def zeros(batch: int) -> jax.Array:
    return jnp.zeros((batch, WIDTH), jnp.float32)


def refused(build: Callable[[], StreamModel], *reasons: str) -> str:
    with pytest.raises(CannotStream) as refusal:
        build()
    text = str(refusal.value)
    assert isinstance(refusal.value, ValueError)
    for reason in reasons:
        assert reason in text, text
    return text


# Time


class Bidirectional(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cells = nn.RNN(nn.SimpleCell(4)), nn.RNN(nn.SimpleCell(4))
        return nn.Bidirectional(*cells, time_major=True)(x)


class Same(nn.Module):
    """A convolution over time that sees as far ahead as back."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Conv(4, (3,), padding="SAME")(jnp.moveaxis(x, 0, 1))
        return jnp.moveaxis(y, 1, 0)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.MultiHeadDotProductAttention(1)(jnp.moveaxis(x, 0, 1))
        return jnp.moveaxis(y, 1, 0)


AHEAD = {
    "subtracts the mean over time": lambda x: (
        x - jnp.broadcast_to(x.mean(axis=0, keepdims=True), x.shape)
    ),
    "looks one step ahead": lambda x: jnp.concatenate([x[1:], jnp.zeros_like(x[:1])]),
    "runs backwards": lambda x: jnp.cumsum(x[::-1], axis=0)[::-1],
    "softmax over time": lambda x: jax.nn.softmax(x, axis=0),
    "mixes in one output of two": lambda x: {
        "good": jnp.tanh(x),
        "bad": jnp.broadcast_to(x.max(axis=0, keepdims=True), x.shape),
    },
}


@pytest.mark.parametrize("call", AHEAD)
def test_a_model_whose_outputs_depend_on_later_steps_is_refused(call: str) -> None:
    text = refused(lambda: plain(AHEAD[call]), "Plain cannot be served", "mixes time steps")
    assert "'bad'" in text if "two" in call else "'output'" in text


@pytest.mark.parametrize("module", [Same(), Attention()], ids=lambda module: type(module).__name__)
def test_a_network_that_sees_the_whole_stream_is_refused(module: nn.Module) -> None:
    refused(
        lambda: linen_model(module, (WIDTH,)),
        type(module).__name__,
        "mixes time steps",
        "later steps",
    )


def test_a_network_that_also_runs_backwards_is_refused() -> None:
    refused(
        lambda: linen_model(Bidirectional(), (WIDTH,)),
        "Bidirectional cannot be served: RNN_1 runs backwards from a stream's end",
    )


class Forgetful(nn.Module):
    """A recurrent network whose carry is not in the state: a loop of its own, no `nn.RNN`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cell = nn.GRUCell(4)
        carry = cell.initialize_carry(jax.random.key(0), x[0].shape)
        outputs = []
        for sample in x:
            carry, output = cell(carry, sample)
            outputs.append(output)
        return jnp.stack(outputs)


class Remembering(nn.Module):
    """The same, its carry kept."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cell = nn.GRUCell(4)
        carry = self.variable("state", "carry", jnp.zeros, (x.shape[1], 4), x.dtype)
        carry.value, y = nn.RNN(cell, time_major=True, return_carry=True)(
            x, initial_carry=carry.value
        )
        return y


class CausalConv(nn.Module):
    """A causal convolution over time; with `keeps`, its window is the state, `[steps, B, ...]`."""

    keeps: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        past = jnp.zeros((2, *x.shape[1:]), x.dtype)
        if self.keeps:
            window = self.variable("state", "window", lambda: past)
            line = jnp.concatenate([window.value, x])
            window.value = line[len(x) :]
        else:
            line = jnp.concatenate([past, x])
        y = nn.Conv(4, (3,), padding="VALID")(jnp.moveaxis(line, 0, 1))
        return jnp.moveaxis(y, 1, 0)


@pytest.mark.parametrize(
    "module", [Forgetful(), CausalConv(False)], ids=["recurrent", "convolution"]
)
def test_a_model_that_forgets_between_frames_is_refused(module: nn.Module) -> None:
    refused(
        lambda: linen_model(module, (WIDTH,)),
        "two frames in a row",
        "what it remembers is not in its state",
    )


def test_a_carry_that_is_handed_on_unchanged_forgets() -> None:
    def step(variables: Any, carry: Any, frames: jax.Array) -> Any:
        return carry, carry[None] + jnp.cumsum(frames, axis=0)

    refused(lambda: carried(step, zeros, name="stuck"), "stuck", "is not in its state")


@pytest.mark.parametrize(
    "module", [Remembering(), CausalConv(True)], ids=["recurrent", "convolution"]
)
def test_a_model_that_keeps_its_past_in_the_state_is_served(module: nn.Module) -> None:
    model = linen_model(module, (WIDTH,))
    # The carry of an RNN is kept besides, whether the module keeps it or not.
    rnns = 2 if isinstance(module, Remembering) else 1
    assert [leaf.axis for leaf in model.spec.leaves] == [int(isinstance(module, CausalConv))] * rnns


def test_a_model_bound_to_one_number_of_steps_is_refused() -> None:
    weights = np.linspace(0.5, 1.5, FRAME * WIDTH, dtype=np.float32).reshape(FRAME, 1, WIDTH)
    text = refused(
        lambda: plain(lambda x: x * jnp.broadcast_to(weights, x.shape)),
        f"takes {FRAME} time steps but not {2 * FRAME}",
    )
    assert "raised" not in text


def test_outputs_that_do_not_grow_with_the_stream_are_refused() -> None:
    refused(lambda: plain(lambda x: jnp.zeros_like(x[:FRAME]) + x[:FRAME]), "does not grow")


# Outputs


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda x: jnp.moveaxis(x, 0, 1), [2, 5, 3]),
        (lambda x: x[-1], [2, 3]),
        (lambda x: x.mean(axis=(0, 1)), [3]),
        (lambda x: x.sum(), []),
        (lambda x: x[1:], [4, 2, 3]),
    ],
    ids=["batch first", "the last step only", "averaged", "a scalar", "a step short"],
)
def test_outputs_that_are_not_time_major_are_refused(call: Any, shape: list[int]) -> None:
    refused(
        lambda: plain(call),
        "time-major outputs [frame, batch, ...]",
        "here [5, 2, ...]",
        f"'output' is {shape}",
    )


def test_batch_first_outputs_are_refused_when_the_frame_is_as_long_as_the_trial_batch() -> None:
    for frame in (1, 2, 3):
        refused(lambda frame=frame: plain(lambda x: jnp.moveaxis(x, 0, 1), frame=frame))


def test_outputs_of_a_fixed_number_of_rows_are_refused() -> None:
    refused(lambda: plain(lambda x: x[:, :2]), "batch")


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        (lambda _: {}, "it returns no outputs"),
        (lambda x: (x, x), "'output' is a tuple"),
        (lambda x: [x], "'output' is a list"),
        (lambda _: None, "'output' is a NoneType"),
        (lambda x: {"a": x, "b": {"c": x}}, "'b' is a dict"),
    ],
    ids=["none at all", "a tuple", "a list", "None", "nested"],
)
def test_outputs_are_one_array_or_a_mapping_of_names_to_arrays(outputs: Any, reason: str) -> None:
    refused(lambda: plain(outputs), reason)


# State


def state_model(start: Callable[[int], Any], update: Callable[[Any], Any]) -> StreamModel:
    """Passes its frames on; its state goes from `start` by `update`, a frame."""
    return carried(lambda _, carry, frames: (update(carry), jnp.tanh(frames)), start)


def test_a_state_leaf_without_a_batch_axis_is_refused() -> None:
    refused(
        lambda: state_model(
            lambda batch: {"kept": zeros(batch), "count": jnp.zeros(4)}, lambda s: s
        ),
        "['count']",
        "[4]",
        "no single batch axis",
    )
    refused(
        lambda: state_model(lambda _: jnp.zeros((), jnp.int32), lambda n: n + 1),
        "shape []",
        "no single batch axis",
    )


def test_a_state_leaf_with_two_batch_axes_is_refused() -> None:
    refused(
        lambda: state_model(lambda batch: jnp.zeros((batch, 4, batch)), lambda s: s),
        "[2, 4, 2]",
        "no single batch axis",
    )


@pytest.mark.parametrize(
    "extra", [lambda batch: 2 * batch, lambda batch: batch + 1], ids=["twice the batch", "one more"]
)
def test_a_state_leaf_whose_axis_is_not_of_the_batchs_own_size_is_refused(extra: Any) -> None:
    refused(
        lambda: state_model(lambda batch: jnp.zeros((extra(batch), 4)), lambda s: s),
        f"[{extra(2)}, 4]",
        "no single batch axis",
    )


def test_a_batch_axis_in_any_one_place_is_found() -> None:
    model = state_model(
        lambda batch: {
            "a": jnp.zeros((batch,)),
            "b": jnp.zeros((2, batch)),
            "c": jnp.zeros((2, 3, batch)),
            "d": jnp.zeros((batch, 2)),
        },
        lambda s: s,
    )
    assert [leaf.axis for leaf in model.spec.leaves] == [0, 1, 2, 0]
    assert [leaf.shape for leaf in model.spec.leaves] == [(), (2,), (2, 3), (2,)]


@pytest.mark.parametrize(
    ("start", "update", "reason"),
    [
        (lambda batch: jnp.zeros((batch,), bool), lambda s: s.astype(jnp.int32) + 1, None),
        (
            lambda batch: jnp.zeros((batch, 1)),
            lambda s: jnp.concatenate([s, s], axis=1),
            "keep its dtype and shape",
        ),
        (lambda batch: (zeros(batch),), lambda s: (*s, s[0]), "after the second"),
        (
            lambda batch: {"a": zeros(batch)},
            lambda s: {"a": s["a"], f"b{len(s)}": s["a"]},
            "after the second",
        ),
    ],
    ids=["dtype of the start only", "shape", "tuple", "names"],
)
def test_a_state_that_changes_from_frame_to_frame_is_refused(
    start: Any, update: Any, reason: str | None
) -> None:
    if reason is None:  # what counts is the state between frames
        assert state_model(start, update).spec.leaves[0].dtype == np.int32
    else:
        refused(lambda: state_model(start, update), reason)


def test_a_state_that_changes_its_dtype_after_the_second_frame_is_refused() -> None:
    narrower = {np.dtype(np.bool_): jnp.int8, np.dtype(np.int8): jnp.float32}
    refused(
        lambda: state_model(
            lambda batch: jnp.zeros((batch, 2), bool),
            lambda s: s.astype(narrower.get(s.dtype, s.dtype)),
        ),
        "int8[2, 2] after the first frame and float32[2, 2] after the second",
    )


def test_a_state_leaf_that_is_a_typed_random_key_is_refused_with_the_reason() -> None:
    refused(
        lambda: state_model(
            lambda batch: jax.random.split(jax.random.key(0), batch), lambda keys: keys
        ),
        "cannot be served",
    )


# What the model raises, dtypes, carries


def test_what_a_model_raises_is_told_and_kept_as_the_cause() -> None:
    def fails(x: jax.Array) -> jax.Array:
        raise LookupError("no such codebook")

    refused(
        lambda: plain(fails),
        f"one frame [{FRAME}, 2, {WIDTH}]",
        "from rest",
        "LookupError: no such codebook",
    )
    with pytest.raises(CannotStream) as refusal:
        plain(fails)
    assert isinstance(refusal.value.__cause__, LookupError)


def test_a_model_that_fails_on_its_second_frame_is_refused() -> None:
    def step(variables: Any, carry: Any, frames: jax.Array) -> Any:
        if carry.shape[1] != WIDTH:
            raise LookupError("that is not where I left off")
        return carry[:, :1], frames

    refused(
        lambda: carried(step, zeros),
        "from the state of the frame before",
        "that is not where I left off",
    )


def test_a_sample_shape_that_the_model_does_not_take_is_refused() -> None:
    variables = nn.Dense(2).init(jax.random.key(0), jnp.zeros((1, 1, 4)))
    refused(
        lambda: models.linen(nn.Dense(2), variables, frame=2, sample_shape=(5,)),
        "Dense cannot be served",
        "[2, 2, 5]",
    )
    assert models.linen(nn.Dense(2), variables, frame=2, sample_shape=(4,)).outputs[0].shape == (
        2,
        2,
    )


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128"])
def test_frames_that_jax_would_narrow_are_refused(dtype: str) -> None:
    refused(lambda: plain(lambda x: x, dtype=dtype), dtype, "jax_enable_x64")


def test_frames_of_float64_are_taken_once_jax_computes_in_them(x64: None) -> None:
    model = plain(lambda x: x, dtype="float64")
    assert (model.dtype, model.outputs[0].dtype) == (np.float64, np.float64)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint8", "int32", "float16", "bfloat16", "float32", "complex64"]
)
def test_frames_of_every_narrower_dtype_are_taken(dtype: str) -> None:
    assert plain(lambda x: x, dtype=jnp.dtype(dtype)).outputs[0].dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("frame", [0, -1])
def test_a_frame_has_at_least_one_step(frame: int) -> None:
    refused(lambda: plain(lambda x: x, frame=frame), "at least one time step", f"frame={frame}")


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (), (3,)])
def test_the_carry_of_one_session_has_a_leading_axis_of_one(shape: tuple[int, ...]) -> None:
    def step(variables: Any, carry: Any, frames: jax.Array) -> Any:
        return carry, frames

    refused(
        lambda: carried(step, {"h": np.zeros(shape, np.float32)}, name="cell"),
        "cell cannot be served: initial_carry['h']",
        str(list(shape)),
        "[1, ...]",
        "function of the batch size",
    )


def test_a_carry_of_one_session_starts_every_session_from_its_values() -> None:
    def step(variables: Any, carry: Any, frames: jax.Array) -> Any:
        sums = carry["h"][None] + jnp.cumsum(frames, axis=0)
        return {"h": sums[-1]}, sums

    start = {"h": np.asarray([[1.0, 2.0, 3.0]], np.float32)}
    server = StreamServer(carried(step, start), slots=3, row_counts=(2,))
    sessions = [server.open() for _ in range(3)]
    for _ in range(2):
        futures = [server.submit(s, np.ones((FRAME, WIDTH), np.float32)) for s in sessions]
        server.run()
    for future in futures:
        np.testing.assert_array_equal(future.result(timeout=0)[-1], [11, 12, 13])


# The batch


class Norm(nn.Module):
    """Spiking neurons behind batch normalisation."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return LI()(LIF(threshold=0.1)(y))


def norm_variables() -> Any:
    variables = Norm().init(jax.random.key(0), jnp.zeros((1, 1, WIDTH)), train=False)
    return {name: tree for name, tree in variables.items() if name != "state"}


def test_batch_statistics_in_training_mode_are_refused_and_running_ones_are_served() -> None:
    def build(**call: Any) -> StreamModel:
        return models.linen(Norm(), norm_variables(), frame=FRAME, sample_shape=(WIDTH,), call=call)

    refused(lambda: build(train=True), "batch_stats")
    assert build().spec.row_bytes > 0


MIXERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "subtracts the batch's mean": lambda x: (
        x - jnp.broadcast_to(x.mean(axis=1, keepdims=True), x.shape)
    ),
    "normalises over the batch": lambda x: (
        x / jnp.broadcast_to(1 + jnp.abs(x).max(axis=1, keepdims=True), x.shape)
    ),
    "hands rows round": lambda x: jnp.roll(x, 1, axis=1),
    "numbers the rows": lambda x: (
        x + jnp.broadcast_to(jnp.arange(x.shape[1], dtype=x.dtype)[None, :, None], x.shape)
    ),
}


@pytest.mark.parametrize(
    ("mixer", "row_counts"),
    [*((mixer, (4,)) for mixer in MIXERS), ("subtracts the batch's mean", (2, 16))],
)
def test_a_model_that_mixes_sessions_is_refused_when_the_engine_is_prepared(
    mixer: str, row_counts: tuple[int, ...]
) -> None:
    engine = Engine(plain(MIXERS[mixer]), 16)
    with pytest.raises(CannotStream, match="depend on the other sessions in the batch"):
        engine.prepare(row_counts)


def test_a_model_that_mixes_sessions_is_refused_with_the_row_counts_of_a_probe() -> None:
    # Launches of one row look steady for such a model; the others give it away.
    with pytest.raises(CannotStream, match="depend on the other sessions in the batch"):
        StreamServer(plain(MIXERS["subtracts the batch's mean"]), slots=16)


def test_a_model_that_mixes_the_features_of_one_session_is_served() -> None:
    server = StreamServer(
        plain(lambda x: x - jnp.broadcast_to(x.mean(axis=2, keepdims=True), x.shape)),
        slots=3,
        row_counts=(4,),
    )
    session = server.open()
    frame = np.arange(FRAME * WIDTH, dtype=np.float32).reshape(FRAME, WIDTH)
    future = server.submit(session, frame)
    server.run()
    np.testing.assert_array_equal(future.result(timeout=0), np.tile([-1.0, 0.0, 1.0], (FRAME, 1)))
