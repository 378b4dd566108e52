"""The models that are measured: a spiking MLP 40-128-128-10, and what is made from it.

`model` is the one of every measurement, unless the measurement is about the size of a state row
(`with_rows_of`) or of a frame (`with_frames_of`).
"""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slotstream_worker import StreamModel, models

FRAME, SIZES = 10, (40, 128, 128, 10)
Array = np.ndarray[Any, Any]


def frames_of(rows: int, *, seed: int = 1) -> Array:
    """Normal frames `[rows, 10, 40]` of float32."""
    return np.random.default_rng(seed).normal(size=(rows, FRAME, SIZES[0])).astype(np.float32)


def model() -> StreamModel:
    """The spiking MLP: 1,600 bytes in, 400 out, a state row of 1,064, random weights."""
    return models.carry(
        _advance,
        lambda batch: tuple(jnp.zeros((batch, n)) for n in SIZES[1:]),
        _weights(),
        frame=FRAME,
        sample_shape=SIZES[:1],
        name="spiking MLP 40-128-128-10",
    )


def with_rows_of(nbytes: int) -> StreamModel:
    """The spiking MLP with a state row of about `nbytes` bytes, all of which change every frame."""
    extra = (nbytes - 4 * sum(SIZES[1:])) // 4
    if extra <= 0:
        return model()

    def step(weights: Any, carry: Any, frames: jax.Array) -> Any:
        after, outputs = _advance(weights, carry[0], frames)
        return (after, carry[1] * 0.5 + outputs[-1][:, :1]), outputs

    return models.carry(
        step,
        lambda batch: (
            tuple(jnp.zeros((batch, n)) for n in SIZES[1:]),
            jnp.zeros((batch, extra)),
        ),
        _weights(),
        frame=FRAME,
        sample_shape=SIZES[:1],
        name=f"spiking MLP with rows of {nbytes} bytes",
    )


def with_frames_of(nbytes: int) -> StreamModel:
    """A leaky sum over frames of `nbytes` bytes: next to no computing, eight numbers out."""

    def step(weights: Any, carry: Any, frames: jax.Array) -> Any:
        def leak(held: jax.Array, mean: jax.Array) -> Any:
            held = held * weights + mean[:, None]
            return held, held

        return jax.lax.scan(leak, carry, frames.mean(axis=2))

    return models.carry(
        step,
        lambda batch: jnp.zeros((batch, 8)),
        np.float32(0.9),
        frame=1,
        sample_shape=(nbytes // 4,),
        name=f"leaky sum of {nbytes} bytes",
    )


def sparx_model() -> tuple[Any, Any]:
    """The same architecture built with sparx: a Flax module and its variables."""
    from sparx.models import SpikingMLP

    module = SpikingMLP(hidden=SIZES[1:-1], classes=SIZES[-1], use_bias=False)
    variables = module.init(jax.random.key(0), jnp.zeros((FRAME, 1, SIZES[0])))
    return module, {"params": variables["params"]}


def sparx_server(slots: int) -> Any:
    """A `sparx.serve.StreamServer` of that model."""
    from sparx.serve import StreamServer

    module, variables = sparx_model()
    return StreamServer(module, variables, slots=slots, frame=FRAME, sample_shape=SIZES[:1])


def why_no_sparx() -> str:
    """Why sparx cannot be measured against here; empty where it can."""
    if sys.version_info < (3, 12):
        return f"sparx needs Python 3.12, and this is {sys.version_info[0]}.{sys.version_info[1]}"
    if importlib.util.find_spec("sparx") is None:
        return "the package sparxml is not installed (`make bench-peers` installs it)"
    return ""


def load_peers() -> None:
    """Import sparx where it is, before JAX computes: it sets XLA's flags, then for both sides."""
    if not why_no_sparx():
        import sparx.serve  # noqa: F401


def _weights() -> list[Array]:
    rng = np.random.default_rng(0)
    return [rng.normal(0, 2 / np.sqrt(a), (a, b)).astype(np.float32) for a, b in pairwise(SIZES)]


def _advance(variables: Any, carry: Any, frames: jax.Array) -> Any:
    after, x = [], frames
    for k, w in enumerate(variables):
        spiking = k < len(variables) - 1

        def neuron(v: jax.Array, current: jax.Array, spiking: bool = spiking) -> Any:
            v = v + (current - v) * 0.3
            if not spiking:
                return v, v
            spikes = (v > 0.5).astype(v.dtype)
            return v * (1 - spikes), spikes

        v, x = jax.lax.scan(neuron, carry[k], x @ w)
        after.append(v)
    return tuple(after), x
