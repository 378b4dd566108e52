"""When a neuron spikes, and what a spike does to its membrane.

`v` is the membrane after the update of the step, `before` that at the step's start, `th` the
threshold; `H(u)` is 1 where `u > 0`, strictly, else 0. Each function gives the membrane that the
next step starts from, and the spikes of this one.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from slotstream_worker.nir.semantics import Firing, Reset

Fire = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""`(v, before, threshold, value to reset to) -> (v, spikes)`."""


def spikes_of(v: jax.Array, th: jax.Array) -> jax.Array:
    """`H(v - th)`."""
    return (v > th).astype(v.dtype)


def times(spikes: jax.Array, th: jax.Array) -> jax.Array:
    """`spikes * th`, 0 without spikes also where the threshold is infinite."""
    return jnp.where(spikes != 0, spikes * th, jnp.zeros_like(spikes))


def fire(firing: Firing, reset: Reset, *, recurrent: bool) -> Fire:
    """The function for a way of firing; `recurrent` says that the neuron lies on a cycle."""
    if firing == "several":
        return _several
    if firing == "late":
        return _late_subtract(recurrent) if reset == "subtract" else _late_zero(recurrent)
    return _subtract if reset == "subtract" else _value


def _value(
    v: jax.Array, before: jax.Array, th: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`s = H(v - th); v = value where s`."""
    del before
    s = spikes_of(v, th)
    return jnp.where(s > 0, value, v), s


def _subtract(
    v: jax.Array, before: jax.Array, th: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`s = H(v - th); v -= s th`."""
    del before, value
    s = spikes_of(v, th)
    return v - times(s, th), s


def _late_zero(recurrent: bool) -> Fire:
    """`rst = H(before - th); v *= 1 - rst; s = H(v - th)`; off cycles also `v -= (s - rst) v`."""

    def fire(
        v: jax.Array, before: jax.Array, th: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del value
        rst = spikes_of(before, th)
        v = v * (1 - rst)
        s = spikes_of(v, th)
        return (v if recurrent else v - (s - rst) * v), s

    return fire


def _late_subtract(recurrent: bool) -> Fire:
    """`rst = H(before - th); v -= rst th; s = H(v - th)`; off cycles also `v -= (s - rst) th`."""

    def fire(
        v: jax.Array, before: jax.Array, th: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del value
        rst = spikes_of(before, th)
        v = v - times(rst, th)
        s = spikes_of(v, th)
        return (v if recurrent else v - times(s - rst, th)), s

    return fire


def _several(
    v: jax.Array, before: jax.Array, th: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`n = trunc(v / th) where v > 0; v -= n th; v = max(v, -th)`: `n` spikes in one step."""
    del before, value
    n = jnp.where(v > 0, jnp.trunc(v / th), jnp.zeros_like(v))
    return jnp.maximum(v - times(n, th), -th), n
