"""Delay: `y(t) = x(t - delay)`, each element with its own."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slotstream_worker.nir.fields import Array, Fields, Shape, common
from slotstream_worker.nir.operator import MAX_VALUES, Operator, State, Weights, expect, row
from slotstream_worker.nir.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Delay(Operator):
    """Hands on what came `steps` time steps ago, elementwise; zeros before the first.

    State: `past` `[batch, longest, *shape]`, the input of the step before first.
    """

    longest: int
    early: bool  # each element waits for a step or more

    @property
    def holds(self) -> bool:  # type: ignore[override]
        """See `Operator.holds`."""
        return self.longest > 0

    def rest(self, batch: int, dtype: Any) -> State:
        """See `Operator.rest`."""
        if not self.longest:
            return {}
        return {"past": jnp.zeros((batch, self.longest, *self.takes), dtype)}

    def quiet(self, weights: Weights, x: jax.Array) -> jax.Array:
        """See `Operator.quiet`."""
        return jnp.where(row(weights["steps"]) == 0, x, jnp.zeros_like(x)) if self.longest else x

    def emit(self, weights: Weights, state: State) -> jax.Array:
        """See `Operator.emit`."""
        return _picked(state["past"], weights["steps"] - 1)

    def step(self, weights: Weights, state: State, x: jax.Array) -> tuple[State, jax.Array]:
        """See `Operator.step`."""
        if not self.longest:
            return {}, x
        known = jnp.concatenate([jnp.expand_dims(x, 1), state["past"]], axis=1)
        return {"past": known[:, :-1]}, _picked(known, weights["steps"])


def _picked(values: jax.Array, index: jax.Array) -> jax.Array:
    """Of values `[batch, steps, *shape]`, those at `index` `[*shape]`."""
    return jnp.take_along_axis(values, row(row(index)), axis=1)[:, 0]


def steps_of(fields: Fields, settings: Settings) -> Array:
    """The delays in steps, int32: `delay / dt`, rounded to the nearest, halves to even."""
    settings.rule(fields)
    delay = fields.reals("delay")
    if (delay < 0).any():
        raise fields.bad(f"its 'delay' is as low as {delay.min():g}; a delay is 0 or more")
    if not delay.any():
        return np.zeros(delay.shape, np.int32)
    steps = np.rint(delay / settings.step_of(fields))
    if steps.max() >= MAX_VALUES:
        raise fields.bad(
            f"its 'delay' of {delay.max():g} is {steps.max():,.0f} steps of {settings.dt:g}; is dt "
            "in the unit of the delays?"
        )
    return steps.astype(np.int32)


def make_delay(fields: Fields, incoming: Shape | None, settings: Settings) -> Operator:
    """The operator of a Delay; raises `BadGraph` where it is no good."""
    steps = steps_of(fields, settings)
    shape = expect(fields, incoming, common(fields, {"delay": steps}, incoming))
    longest = int(steps.max(initial=0))
    if (held := longest * prod(shape)) > MAX_VALUES:
        raise fields.bad(
            f"it would hold {held:,} values of each session, {longest:,} steps of {list(shape)}; "
            f"at most {MAX_VALUES:,} are taken. Is dt in the unit of the delays?"
        )
    weights = {"steps": np.broadcast_to(steps, shape)} if longest else {}
    early = bool((steps > 0).all())
    return Delay(shape, shape, weights, longest=longest, early=early)
