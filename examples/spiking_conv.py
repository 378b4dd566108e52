"""A convolutional spiking network on the frames of an event camera, in Flax linen.

    python examples/spiking_conv.py
    slotstream worker --model examples.spiking_conv:model

Each layer's membranes stand in the collection `state`, which `models.linen` carries from frame to
frame. The streams are events (brighter and darker, counted a millisecond) of a disc that moves.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from slotstream_worker import StreamModel, models

SIDE, CLASSES = 24, 4


class Spiking(nn.Module):
    """Leaky integrate-and-fire neurons that are reset by subtraction; tau in steps."""

    tau: float
    threshold: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map currents `[time, batch, ...]` to spikes, 0 or 1."""
        membrane = self.variable("state", "membrane", lambda: jnp.zeros(x.shape[1:], x.dtype))
        keep = jnp.exp(jnp.asarray(-1 / self.tau, x.dtype))

        def step(v: jax.Array, current: jax.Array) -> tuple[jax.Array, jax.Array]:
            v = keep * v + current
            spikes = (v >= self.threshold).astype(v.dtype)
            return v - self.threshold * spikes, spikes

        membrane.value, spikes = jax.lax.scan(step, membrane.value, x)
        return spikes


class Integrator(nn.Module):
    """A leaky integrator without spikes: the readout."""

    tau: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map currents `[time, batch, n]` to membranes of that shape."""
        membrane = self.variable("state", "membrane", lambda: jnp.zeros(x.shape[1:], x.dtype))
        keep = jnp.exp(jnp.asarray(-1 / self.tau, x.dtype))
        membrane.value, trace = jax.lax.scan(
            lambda v, current: (keep * v + (1 - keep) * current,) * 2, membrane.value, x
        )
        return trace


class EventNet(nn.Module):
    """Two spiking convolutions, a spiking dense layer, a leaky readout."""

    @nn.compact
    def __call__(self, events: jax.Array) -> dict[str, jax.Array]:
        """Map event counts `[time, batch, side, side, 2]` to scores and the share that fires."""
        x = jnp.log1p(events.astype(jnp.float32))
        x = Spiking(tau=4.0)(6 * nn.Conv(8, (5, 5), strides=2)(x))
        x = Spiking(tau=8.0)(4 * nn.Conv(16, (3, 3), strides=2)(x))
        rate = jnp.mean(x, axis=(-3, -2, -1))
        x = Spiking(tau=16.0)(2 * nn.Dense(32)(x.reshape(*x.shape[:2], -1)))
        return {"scores": Integrator(tau=30.0)(nn.Dense(CLASSES)(x)), "rate": rate}


NET = EventNet()


def variables() -> dict:
    """The network's variables; a checkpoint of yours goes here."""
    shape = (1, 1, SIDE, SIDE, 2)
    return {"params": NET.init(jax.random.key(0), jnp.zeros(shape, jnp.uint8))["params"]}


def model() -> StreamModel:
    """Serve it: ten milliseconds a frame, back the last scores and the mean rate."""
    return models.linen(
        NET,
        variables(),
        frame=10,
        sample_shape=(SIDE, SIDE, 2),
        dtype="uint8",
        outputs={"scores": "last", "rate": "mean"},
    )


def direct(stream: np.ndarray) -> dict[str, jax.Array]:
    """The network called once, over a whole stream."""
    outputs, _ = NET.apply(variables(), jnp.asarray(stream)[:, None], mutable=["state"])
    return jax.tree.map(lambda y: y[:, 0], outputs)


def streams() -> dict[str, np.ndarray]:
    """What an event camera reports of a bright disc: where its logarithm changes, and which way."""
    ys, xs = np.mgrid[:SIDE, :SIDE]
    ways = {"left": (-0.25, 0.0), "falling": (0.05, 0.3), "circling": None, "blinking": (0.0, 0.0)}
    found = {}
    for k, (name, velocity) in enumerate(ways.items()):
        rng = np.random.default_rng(k)
        t = np.arange(81 + 20 * k)
        turn = SIDE / 2 + 6 * np.stack([np.cos(t / 9), np.sin(t / 9)], 1)
        at = turn if velocity is None else (SIDE / 2 + np.outer(t - len(t) / 2, velocity)) % SIDE
        light = 0.5 + 0.5 * np.sign(np.sin(t / 4)) if name == "blinking" else np.ones(len(t))
        far = (xs - at[:, 0, None, None]) ** 2 + (ys - at[:, 1, None, None]) ** 2
        change = np.diff(np.log(0.1 + light[:, None, None] * np.exp(-far / 18)), axis=0)
        counts = np.stack([change, -change], -1) / 0.1
        found[name] = rng.poisson(np.maximum(counts, 0) + 0.002).clip(0, 255).astype(np.uint8)
    return found


if __name__ == "__main__":
    from serve import demonstrate

    demonstrate(model(), streams(), direct)
