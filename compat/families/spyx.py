"""Spyx: spiking layers of nnx with an explicit state, `run` over the whole stream."""

from typing import Any

import jax
import spyx.nn as snn
from flax import nnx

from compat.case import Case, Cases
from slotstream_worker import models

PACKAGE = "spyx"


def network(layers: Any, sample: tuple[int, ...] = (40,)) -> Case:
    """A `Sequential`, against `spyx.nn.run`."""
    net = snn.Sequential(*layers(nnx.Rngs(0)))
    graph, weights = nnx.split(net)

    def step(weights: Any, state: Any, frames: jax.Array) -> Any:
        outputs, state = snn.run(nnx.merge(graph, weights), frames, state)
        return state, outputs

    def whole(stream: jax.Array) -> Any:
        return snn.run(snn.Sequential(*layers(nnx.Rngs(0))), stream[:, None])[0][:, 0]

    model = models.carry(
        step, net.initial_state, weights, frame=5, sample_shape=sample, name="Sequential"
    )
    return Case(model, whole, "carry", lambda rng, steps: 2 * rng.random((steps, *sample)))


def dense(neuron: Any) -> Any:
    """A hidden layer of that neuron, and a leaky readout."""

    def layers(rngs: nnx.Rngs) -> list[Any]:
        first = nnx.Linear(40, 32, rngs=rngs), neuron((32,), rngs=rngs)
        return [*first, nnx.Linear(32, 5, rngs=rngs), snn.LI((5,), rngs=rngs)]

    return layers


def convolution(rngs: nnx.Rngs) -> list[Any]:
    """A convolution of spikes."""
    return [
        nnx.Conv(2, 8, (3, 3), strides=2, rngs=rngs),
        snn.LIF((6, 6, 8), rngs=rngs),
        snn.Flatten(),
        nnx.Linear(288, 5, rngs=rngs),
        snn.LI((5,), rngs=rngs),
    ]


CASES: Cases = {
    **{
        name: (lambda name=name: network(dense(getattr(snn, name))))
        for name in ("IF", "LIF", "ALIF", "CuBaLIF", "RIF", "RLIF", "RCuBaLIF", "PSU_LIF")
    },
    "convolutional": lambda: network(convolution, (12, 12, 2)),
}
