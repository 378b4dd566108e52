"""flax.nnx: recurrent cells, a module with RNNs inside, and one that writes to its Variables."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from compat.case import Case, Cases
from slotstream_worker import models

PACKAGE, NAME = "flax", "flax.nnx"


def cell(kind: Any) -> Case:
    """A cell, against `nnx.RNN` over the whole stream."""

    def whole(stream: jax.Array) -> Any:
        # Made in here: an nnx module belongs to the trace it is made in.
        return nnx.RNN(kind(6, 16, rngs=nnx.Rngs(4)))(stream[None], rngs=nnx.Rngs(0))[0]

    served = models.rnn(kind(6, 16, rngs=nnx.Rngs(4)), frame=5, sample_shape=(6,))
    return Case(served, whole, "rnn")


class Tagger(nnx.Module):
    """Two RNNs with dropout between, and a head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.RNN(nnx.GRUCell(6, 16, rngs=rngs))
        self.drop = nnx.Dropout(0.4, rngs=rngs)
        self.second = nnx.RNN(nnx.OptimizedLSTMCell(16, 12, rngs=rngs))
        self.head = nnx.Linear(12, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, time, features]` to `[batch, time, 3]`."""
        return self.head(self.second(self.drop(self.first(x))))


def module() -> Case:
    """The module, against its own call in eval mode."""

    def whole(stream: jax.Array) -> Any:
        tagger = Tagger(nnx.Rngs(5))
        tagger.eval()
        return tagger(stream[None])[0]

    model = models.nnx(Tagger(nnx.Rngs(5)), frame=5, sample_shape=(6,), batch_major=True)
    return Case(model, whole, "nnx")


class Trace(nnx.Variable):
    """A leaky trace of what went through."""


class Leaky(nnx.Module):
    """Keeps its trace in a Variable, as stateful nnx layers do."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mix = nnx.Linear(6, 8, rngs=rngs)
        self.trace = Trace(jnp.zeros((1, 8)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[time, batch, 6]` to `[time, batch, 8]`, and keep the last trace."""

        def step(trace: jax.Array, drive: jax.Array) -> Any:
            trace = 0.9 * trace + drive
            return trace, jnp.tanh(trace)

        last, ys = jax.lax.scan(step, self.trace.get_value(), self.mix(x))
        self.trace.set_value(last)
        return ys


def variables() -> Case:
    """Its state is a Variable that a call writes to."""
    model = models.nnx(Leaky(nnx.Rngs(6)), frame=5, sample_shape=(6,))
    return Case(model, lambda stream: Leaky(nnx.Rngs(6))(stream[:, None])[:, 0], "nnx")


CASES: Cases = {
    "SimpleCell": lambda: cell(nnx.SimpleCell),
    "GRUCell": lambda: cell(nnx.GRUCell),
    "LSTMCell": lambda: cell(nnx.LSTMCell),
    "OptimizedLSTMCell": lambda: cell(nnx.OptimizedLSTMCell),
    "module with two RNNs and dropout": module,
    "module that writes to a Variable": variables,
}
