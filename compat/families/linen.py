"""flax.linen: recurrent cells, and a whole module with RNNs inside, as one trains it."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from compat.case import Case, Cases
from slotstream_worker import models

PACKAGE, NAME = "flax", "flax.linen"
KEY = jax.random.key(3)


def cell(cell: Any, sample: tuple[int, ...] = (6,)) -> Case:
    """A cell, against `nn.RNN` over the whole stream."""
    carry = cell.initialize_carry(KEY, (1, *sample))
    variables = cell.init(KEY, carry, jnp.zeros((1, *sample)))

    def whole(stream: jax.Array) -> Any:
        return nn.RNN(cell).apply({"params": {"cell": variables["params"]}}, stream[None])[0]

    model = models.rnn(cell, variables, frame=5, sample_shape=sample)
    return Case(model, whole, "rnn")


class Tagger(nn.Module):
    """Two RNNs and a head, batch first; nothing in it knows of streaming."""

    both_ways: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, time, features]` to log-probabilities `[batch, time, 3]`."""
        first = nn.RNN(nn.GRUCell(16))
        if self.both_ways:
            first = nn.Bidirectional(first, nn.RNN(nn.GRUCell(16)))
        h = nn.RNN(nn.OptimizedLSTMCell(12))(nn.LayerNorm()(first(x)))
        return nn.log_softmax(nn.Dense(3)(h))


def module(both_ways: bool = False) -> Case:
    """The module, against its own call."""
    tagger = Tagger(both_ways)
    variables = tagger.init(KEY, jnp.zeros((1, 4, 6)))
    model = models.linen(tagger, variables, frame=5, sample_shape=(6,), batch_major=True)
    return Case(model, lambda stream: tagger.apply(variables, stream[None])[0], "linen")


CASES: Cases = {
    "SimpleCell": lambda: cell(nn.SimpleCell(16)),
    "GRUCell": lambda: cell(nn.GRUCell(16)),
    "MGUCell": lambda: cell(nn.MGUCell(16)),
    "LSTMCell": lambda: cell(nn.LSTMCell(16)),
    "OptimizedLSTMCell": lambda: cell(nn.OptimizedLSTMCell(16)),
    "ConvLSTMCell": lambda: cell(nn.ConvLSTMCell(4, (3, 3)), (8, 8, 2)),
    "module with two RNNs": module,
    "module with a Bidirectional RNN": lambda: module(both_ways=True),
}
