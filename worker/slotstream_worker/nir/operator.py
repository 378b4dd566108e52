"""What a node does in one time step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from slotstream_worker.nir.fields import Array, Fields, Shape, listed

MAX_VALUES = 2**26
"""Values that a node may give, take or hold of one session: 256 MiB in float32."""

Weights = Mapping[str, jax.Array]
State = dict[str, jax.Array]


@dataclass(frozen=True)
class Operator:
    """A node that holds nothing over time.

    `takes` and `gives` are shapes of one session's input and output of one step; arrays have a
    batch axis before them. `weights` are float64 until the model casts them.
    """

    takes: Shape
    gives: Shape
    weights: Mapping[str, Array] = field(default_factory=dict)

    early = False
    """Whether the output of a step depends on the state before it alone."""

    holds = False
    """Whether it holds a state over time."""

    def rest(self, batch: int, dtype: Any) -> State:
        """The state that a session starts from: leaves `[batch, ...]`."""
        del batch, dtype
        return {}

    def emit(self, weights: Weights, state: State) -> jax.Array:
        """The output of a step, before its input is there; of early operators only."""
        raise NotImplementedError

    def step(self, weights: Weights, state: State, x: jax.Array) -> tuple[State, jax.Array]:
        """One time step: input `[batch, *takes]` to the state after it and `[batch, *gives]`."""
        return state, self.apply(weights, x)

    def quiet(self, weights: Weights, x: jax.Array) -> jax.Array:
        """The output before the first step, for an input of that time and no past."""
        return self.apply(weights, x)

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """The output, where there is no state."""
        del weights
        return x


def expect(fields: Fields, incoming: Shape | None, own: Shape | None) -> Shape:
    """The shape of a node's input: its own, which what comes must have.

    Raises:
        BadGraph: they differ, or neither is known.
    """
    if own is None and incoming is None:
        raise fields.bad(
            "nothing says the shape of its input; give the graph an Input node with its shape"
        )
    if own is not None and incoming is not None and own != incoming:
        raise fields.bad(f"it takes {listed(own)}, and what leads to it gives {listed(incoming)}")
    return own if own is not None else incoming or ()


def row(weight: jax.Array) -> jax.Array:
    """A parameter with a batch axis before it."""
    return jnp.expand_dims(weight, 0)
