"""The model that is measured: a spiking MLP 40-128-128-10, frames of 10 steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slotstream_worker import StreamModel, models

FRAME, SIZES = 10, (40, 128, 128, 10)


def model() -> StreamModel:
    rng = np.random.default_rng(0)
    weights = [rng.normal(0, 2 / np.sqrt(a), (a, b)).astype(np.float32) for a, b in pairwise(SIZES)]

    def step(variables: Any, carry: Any, frames: jax.Array) -> Any:
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

    return models.carry(
        step,
        lambda batch: tuple(jnp.zeros((batch, n)) for n in SIZES[1:]),
        weights,
        frame=FRAME,
        sample_shape=SIZES[:1],
        name="spiking MLP 40-128-128-10",
    )
