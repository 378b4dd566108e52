"""memax: memory models of one example with a start flag; complex, bool and integer state."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from memax.equinox.models.residual import ResidualModel
from memax.equinox.semigroups.ffm import FFM
from memax.equinox.semigroups.lru import LRU
from memax.equinox.set_actions.gru import GRU

from compat.case import Case, Cases
from slotstream_worker import models

PACKAGE = "memax"
KEY = jax.random.key(0)


def started(stream: jax.Array) -> jax.Array:
    """No step starts another sequence: a session is one."""
    return jnp.zeros(stream.shape[0], bool)


def memory(module: Any) -> Case:
    """A module, against its own call over the whole stream from its initial state."""
    arrays, static = eqx.partition(module, eqx.is_array)

    def step(weights: Any, state: Any, frames: jax.Array) -> Any:
        whole = eqx.combine(weights, static)
        states, outputs = whole(state, (frames, started(frames)))
        return whole.latest_recurrent_state(states), outputs

    def whole(stream: jax.Array) -> Any:
        return module(module.initialize_carry(), (stream, started(stream)))[1]

    start = module.initialize_carry()
    model = models.example(
        step, start, arrays, frame=5, sample_shape=(6,), name=type(module).__name__
    )
    return Case(model, whole, "example")


def residual(layer: Any) -> Any:
    """Two layers in memax's residual model."""
    return ResidualModel(layer, 6, 4, 16, num_layers=2, key=KEY)


CASES: Cases = {
    "LRU": lambda: memory(LRU(6, 6, KEY)),
    "FFM": lambda: memory(FFM(6, 8, 4, KEY)),
    "residual LRU": lambda: memory(
        residual(lambda recurrent_size, key: LRU(recurrent_size, recurrent_size, key))
    ),
    "residual FFM": lambda: memory(
        residual(lambda recurrent_size, key: FFM(recurrent_size, 8, 4, key))
    ),
    "residual GRU": lambda: memory(residual(GRU)),
}
