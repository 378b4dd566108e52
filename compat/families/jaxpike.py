"""jaxpike: spiking layers of Equinox with explicit state, `unroll` over the whole stream."""

from typing import Any

import equinox as eqx
import jax
import jaxpike as jp

from compat.case import Case, Cases
from slotstream_worker import models

PACKAGE = "jaxpike"
FIRST, SECOND = jax.random.split(jax.random.key(0))


def network(net: Any, sample: tuple[int, ...] = (40,)) -> Case:
    """A network, against `jaxpike.unroll` of a batch of one."""
    arrays, static = eqx.partition(net, eqx.is_array)

    def step(weights: Any, state: Any, frames: jax.Array) -> Any:
        spikes, state = jp.unroll(eqx.combine(weights, static), frames, state)
        return state, spikes

    def start(batch: int) -> Any:
        return net.init_state((batch, *sample))

    def whole(stream: jax.Array) -> Any:
        return jp.unroll(net, stream[:, None])[0][:, 0]

    model = models.carry(step, start, arrays, frame=5, sample_shape=sample, name="Sequential")
    return Case(model, whole, "carry", lambda rng, steps: 3 * rng.random((steps, *sample)))


def dense(*neurons: Any, gain: float = 6.0) -> Any:
    """Two dense layers, each with its neurons; the gain is what makes a deep network fire."""
    first = jp.Dense(40, 32, key=FIRST, gain=gain)
    return jp.Sequential(first, neurons[0], jp.Dense(32, 5, key=SECOND, gain=gain), neurons[1])


CASES: Cases = {
    "LIF": lambda: network(dense(jp.LIF(tau=3.0), jp.LIF(tau=3.0))),
    "ALIF": lambda: network(dense(jp.ALIF(tau=3.0, tau_a=20.0), jp.LeakyIntegrator(tau=5.0))),
    "LinearLIF": lambda: network(dense(jp.LinearLIF(tau=3.0), jp.LeakyIntegrator(tau=5.0))),
    "Izhikevich": lambda: network(dense(jp.Izhikevich(), jp.LeakyIntegrator(tau=5.0), gain=30.0)),
    "convolutional": lambda: network(
        jp.Sequential(
            jp.Conv2d(2, 8, 3, key=FIRST, stride=2),
            jp.LIF(tau=3.0),
            jp.Flatten(),
            jp.Dense(288, 5, key=SECOND),
            jp.LeakyIntegrator(tau=5.0),
        ),
        (12, 12, 2),
    ),
}
