"""Neurons and integrators: I, IF, LI, LIF, CubaLI, CubaLIF."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slotstream_worker.nir.fields import Array, Fields, Shape, common
from slotstream_worker.nir.firing import Fire, fire, spikes_of, times
from slotstream_worker.nir.membrane import membrane, parameters
from slotstream_worker.nir.operator import Operator, State, Weights, expect, row
from slotstream_worker.nir.semantics import Requirement
from slotstream_worker.nir.settings import Settings

CLOSE = 1e-5
"""Relative distance within which a gain counts as 1, as NumPy's `allclose` and the importers."""


@dataclass(frozen=True)
class Integrator(Operator):
    """I, LI, CubaLI: the output is the membrane after the step.

    State: `v`, and `i` of those with a current, each `[batch, *shape]`, from 0.
    """

    holds = True

    def rest(self, batch: int, dtype: Any) -> State:
        """See `Operator.rest`."""
        names = ("i", "v") if "di" in self.weights else ("v",)
        return {name: jnp.zeros((batch, *self.takes), dtype) for name in names}

    def quiet(self, weights: Weights, x: jax.Array) -> jax.Array:
        """See `Operator.quiet`."""
        del weights
        return jnp.zeros_like(x)

    def update(self, weights: Weights, state: State, x: jax.Array) -> State:
        """The membrane equation of `membrane.py`."""
        v = state["v"]
        if "d" in weights:
            v = row(weights["d"]) * v
        if "ci" in weights:
            v = v + row(weights["ci"]) * state["i"]
        v = v + row(weights["g"]) * x
        if "c" in weights:
            v = v + row(weights["c"])
        if "di" not in weights:
            return {"v": v}
        return {"i": row(weights["di"]) * state["i"] + row(weights["gi"]) * x, "v": v}

    def step(self, weights: Weights, state: State, x: jax.Array) -> tuple[State, jax.Array]:
        """See `Operator.step`."""
        after = self.update(weights, state, x)
        return after, after["v"]


@dataclass(frozen=True, kw_only=True)
class Spiking(Integrator):
    """IF, LIF, CubaLIF that spike after the update."""

    fire: Fire

    def step(self, weights: Weights, state: State, x: jax.Array) -> tuple[State, jax.Array]:
        """See `Operator.step`."""
        after = self.update(weights, state, x)
        v, spikes = self.fire(
            after["v"], state["v"], row(weights["threshold"]), row(weights["reset"])
        )
        return {**after, "v": v}, spikes


@dataclass(frozen=True)
class SpikingBefore(Integrator):
    """A neuron that spikes on the membrane of the step before, and is then updated.

    `s = H(v - th); v -= s th`, then the update.
    """

    early = True

    def emit(self, weights: Weights, state: State) -> jax.Array:
        """See `Operator.emit`."""
        return spikes_of(state["v"], row(weights["threshold"]))

    def step(self, weights: Weights, state: State, x: jax.Array) -> tuple[State, jax.Array]:
        """See `Operator.step`."""
        spikes = self.emit(weights, state)
        left = state["v"] - times(spikes, row(weights["threshold"]))
        return self.update(weights, {**state, "v": left}, x), spikes


def make_neuron(
    fields: Fields, incoming: Shape | None, settings: Settings, recurrent: bool
) -> Operator:
    """The operator of a neuron or integrator; `recurrent` says that it lies on a cycle.

    Raises:
        BadGraph: a field is missing or no good, or the semantics do not cover it.
    """
    rule = settings.rule(fields)
    given = parameters(fields)
    shape = expect(fields, incoming, common(fields, given, incoming))
    given = {name: np.broadcast_to(value, shape) for name, value in given.items()}
    made = membrane(fields, given, settings, rule.gain)
    for requirement in rule.requires:
        _require(fields, requirement, given, settings, recurrent)
    weights = _worth_it(made.coefficients)
    if "v_threshold" not in given:
        return Integrator(shape, shape, weights)
    threshold = given["v_threshold"]
    if rule.gain == "in the threshold":
        if (made.scale <= 0).any():
            raise fields.bad(
                f"its 'r' is as low as {given['r'].min():g}, and {settings.semantics.name} divides "
                "the threshold by r dt / tau; it must be above 0"
            )
        threshold = threshold / made.scale
    if rule.firing == "several" and (threshold <= 0).any():
        raise fields.bad(
            f"its 'v_threshold' is as low as {threshold.min():g}, and {settings.semantics.name} "
            "counts how often it fits into the membrane; it must be above 0"
        )
    weights["threshold"] = threshold
    if rule.firing == "before":
        return SpikingBefore(shape, shape, weights)
    reset = rule.reset or settings.reset
    weights["reset"] = given["v_reset"] if reset == "value" else np.zeros(shape)
    return Spiking(shape, shape, weights, fire=fire(rule.firing, reset, recurrent=recurrent))


def _worth_it(coefficients: dict[str, Array]) -> dict[str, Array]:
    return {
        name: value
        for name, value in coefficients.items()
        if name in ("g", "gi", "di") or (value != (1.0 if name == "d" else 0.0)).any()
    }


def _require(
    fields: Fields,
    requirement: Requirement,
    held: Mapping[str, Array],
    settings: Settings,
    recurrent: bool,
) -> None:
    name = settings.semantics.name
    if requirement == "no cycle":
        if recurrent:
            raise fields.bad(
                f"it lies on a cycle, and the semantics of {name} have been verified for recurrent "
                "CubaLIF only; --semantics nir takes it"
            )
    elif requirement == "no leak voltage":
        if held["v_leak"].any():
            raise fields.bad(
                f"its 'v_leak' is not 0, which the semantics of {name} have not been verified "
                "for; --semantics nir takes it"
            )
    else:
        dt = settings.step_of(fields)
        r, tau, w = (
            ("r", "tau_mem", held["r"] * dt / held["tau_mem"])
            if requirement == "membrane gain of 1"
            else ("w_in", "tau_syn", held["w_in"] * dt / held["tau_syn"])
        )
        if not np.allclose(w, 1.0, rtol=CLOSE):
            raise fields.bad(
                f"{r} dt / {tau} is {w.min():g} to {w.max():g}, and {name} has no such factor: it "
                "must be 1. Is dt the one it was trained with? --semantics nir takes any"
            )
