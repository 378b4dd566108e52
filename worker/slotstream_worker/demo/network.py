"""The demo's network: two recurrent layers of spiking neurons and a leaky readout.

Each hidden layer holds leaky integrate-and-fire neurons with a synaptic current and an adaptive
threshold (Bellec et al. 2018, "Long short-term memory and learning-to-learn in networks of spiking
neurons", NeurIPS 31). They learn through a surrogate gradient (Neftci, Mostafa and Zenke 2019,
"Surrogate gradient learning in spiking neural networks", IEEE Signal Processing Magazine 36 (6)).

The network streams: the collection `state` holds all that one step hands to the next, so that a
recording may come in frames of any number of steps. So that a session's spikes depend neither on
the frames nor on its company in a batch, every matrix product is exact: inputs and shipped weights
lie on coarse binary grids, spikes are 0 or 1, and no sum needs more than the 24 significant bits
of a float32 (nor a factor more than the 11 of TF32), so that the order of adding can't matter.
"""

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load as load_safetensors

from slotstream_worker.demo.vowels import CHANNELS, SPEAKERS

INPUT_GRID = 1 / 64  # in standard deviations of the training set, as is the limit
INPUT_LIMIT = 8.0
WEIGHT_GRID = 1 / 512
WEIGHT_LIMIT = 2.0 - WEIGHT_GRID
SURROGATE_SLOPE = 5.0


@jax.custom_jvp
def spike(potential: jax.Array) -> jax.Array:
    """Return 1.0 where the potential (relative to the threshold) is positive, else 0.0."""
    return (potential > jnp.float32(0.0)).astype(jnp.float32)


@spike.defjvp
def _spike_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Let the derivative of a fast sigmoid stand in for the step's, which is 0 or infinite."""
    (potential,), (tangent,) = primals, tangents
    slope = jnp.float32(SURROGATE_SLOPE)
    return spike(potential), tangent / (jnp.float32(1.0) + slope * jnp.abs(potential)) ** 2


def _decays(shortest: float, longest: float) -> Callable[..., jax.Array]:
    """Draw logits of per-step decays, their time constants (in steps) spread evenly in log."""

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        low, high = np.log(shortest), np.log(longest)
        steps = jnp.exp(jax.random.uniform(key, shape, jnp.float32, float(low), float(high)))
        decay = jnp.exp(jnp.float32(-1.0) / steps)
        return jnp.log(decay) - jnp.log1p(-decay)

    return draw


def _recall(module: nn.Module, name: str, shape: tuple[int, ...]) -> jax.Array:
    """Return a state leaf, float32 `shape`, or zeros (the rest) where there is none yet."""
    if module.has_variable("state", name):
        leaf: jax.Array = module.get_variable("state", name)
        return leaf
    return jnp.zeros(shape, jnp.float32)


def _keep(module: nn.Module, name: str, leaf: jax.Array) -> None:
    """Store a state leaf where the caller made `state` mutable; `init` stores the rest."""
    if module.is_mutable_collection("state"):
        module.put_variable(
            "state", name, jnp.zeros_like(leaf) if module.is_initializing() else leaf
        )


class SpikingLayer(nn.Module):
    """One layer of `neurons` recurrent, adaptive leaky integrate-and-fire neurons."""

    neurons: int
    gain: float
    recurrent: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map float32 [time, batch, inputs] to spikes, float32 0 or 1 [time, batch, N].

        The state, all float32 [batch, N]: `current` (synaptic, with the last spikes' share
        added), `membrane` (potential in units of the resting threshold) and `adaptation`.
        """
        one = jnp.float32(1.0)
        inputs = x.shape[-1]
        row = (1, self.neurons)
        weights = self.param(
            "weights",
            nn.initializers.normal(self.gain / inputs**0.5, jnp.float32),
            (inputs, self.neurons),
        )
        bias = self.param("bias", nn.initializers.uniform(0.5, jnp.float32), row)
        back = None
        if self.recurrent:
            back = self.param(
                "recurrent",
                nn.initializers.normal(0.3 / self.neurons**0.5, jnp.float32),
                (self.neurons, self.neurons),
            )
        alpha = nn.sigmoid(self.param("current_decay", _decays(0.5, 5.0), row))
        beta = nn.sigmoid(self.param("membrane_decay", _decays(1.0, 10.0), row))
        rho = nn.sigmoid(self.param("adaptation_decay", _decays(3.0, 30.0), row))
        rise = nn.softplus(
            self.param("adaptation", nn.initializers.constant(-1.0), row, jnp.float32)
        )

        def step(
            carry: tuple[jax.Array, jax.Array, jax.Array], drive: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
            current, membrane, adaptation = carry
            current = alpha * current + drive
            membrane = beta * membrane + (one - beta) * (current + bias)
            spikes = spike(membrane - one - rise * adaptation)
            membrane = membrane - spikes
            adaptation = rho * adaptation + (one - rho) * spikes
            if back is not None:
                current = current + spikes @ back
            return (current, membrane, adaptation), spikes

        names = ("current", "membrane", "adaptation")
        shape = (x.shape[1], self.neurons)
        current, membrane, adaptation = (_recall(self, name, shape) for name in names)
        last, spikes = jax.lax.scan(step, (current, membrane, adaptation), x @ weights)
        for name, leaf in zip(names, last, strict=True):
            _keep(self, name, leaf)
        return spikes


class LeakyReadout(nn.Module):
    """Leaky, silent output neurons: their potentials are the scores."""

    outputs: int

    @nn.compact
    def __call__(self, spikes: jax.Array) -> jax.Array:
        """Map spikes, float32 [time, batch, N] to scores, float32 [time, batch, outputs].

        The state: `membrane`, float32 [batch, outputs].
        """
        inputs = spikes.shape[-1]
        row = (1, self.outputs)
        weights = self.param(
            "weights",
            nn.initializers.normal(1.0 / inputs**0.5, jnp.float32),
            (inputs, self.outputs),
        )
        bias = self.param("bias", nn.initializers.zeros, row, jnp.float32)
        kappa = nn.sigmoid(self.param("membrane_decay", _decays(3.0, 6.0), row))

        def step(membrane: jax.Array, drive: jax.Array) -> tuple[jax.Array, jax.Array]:
            membrane = kappa * membrane + (jnp.float32(1.0) - kappa) * drive
            return membrane, membrane + bias

        membrane = _recall(self, "membrane", (spikes.shape[1], self.outputs))
        membrane, scores = jax.lax.scan(step, membrane, spikes @ weights)
        _keep(self, "membrane", membrane)
        return scores


class SpeakerNet(nn.Module):
    """Scores nine speakers at every step of speech; see the module's docstring.

    `dropout` is the share of a recording's hidden neurons that training silences; a call drops
    only where it is given `dropout` random numbers (rngs) and `train=True`.
    """

    hidden: tuple[int, ...] = (128, 128)
    gains: tuple[float, ...] = (2.0, 3.0)
    recurrent: bool = True
    dropout: float = 0.5

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> dict[str, jax.Array]:
        """Map cepstra, float32 [time, batch, 12], of one step or more to scores and spikes.

        Returns time-major `scores`, float32 [time, batch, 9], and `spikes`, uint8
        [time, batch, N]: those of all hidden neurons, the first layer's first.
        """
        mean = self.variable("constants", "mean", jnp.zeros, (CHANNELS,), jnp.float32).value
        scale = self.variable("constants", "scale", jnp.ones, (CHANNELS,), jnp.float32).value
        # Not a division, which a compiler may turn into a product that rounds otherwise.
        x = (x.astype(jnp.float32) - mean[None, None, :]) * scale[None, None, :]
        x = jnp.clip(x, jnp.float32(-INPUT_LIMIT), jnp.float32(INPUT_LIMIT))
        x = jnp.round(x * jnp.float32(1 / INPUT_GRID)) * jnp.float32(INPUT_GRID)
        layers: list[jax.Array] = []
        heard: list[jax.Array] = []
        for index, (neurons, gain) in enumerate(zip(self.hidden, self.gains, strict=True)):
            spikes = SpikingLayer(neurons, gain, self.recurrent, name=f"layer{index}")(x)
            layers.append(spikes)
            x = spikes
            if train and self.dropout > 0.0:
                # One mask for all the steps: dropping a neuron, not a spike here and there.
                kept = jax.random.bernoulli(
                    self.make_rng("dropout"), 1.0 - self.dropout, (1, *spikes.shape[1:])
                )
                x = spikes * (kept.astype(jnp.float32) / jnp.float32(1.0 - self.dropout))
            heard.append(x)
        scores = LeakyReadout(SPEAKERS, name="readout")(jnp.concatenate(heard, axis=-1))
        return {"scores": scores, "spikes": jnp.concatenate(layers, axis=-1).astype(jnp.uint8)}


def averaged(scores: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return the scores [time, batch, 9] averaged over each row's own steps: [batch, 9]."""
    inside = (jnp.arange(scores.shape[0])[:, None] < lengths[None, :]).astype(jnp.float32)
    total = jnp.sum(scores * inside[:, :, None], axis=0)
    return total / lengths.astype(jnp.float32)[:, None]


def load_variables(path: Path | None = None) -> dict[str, Any]:
    """Return the variables tree (`params`, `constants`) of a safetensors file.

    The file's names are the tree's, joined by "/"; without a path, it is the shipped one.
    """
    if path is None:
        stored = resources.files("slotstream_worker.demo").joinpath("data", "weights.safetensors")
        tensors = load_safetensors(stored.read_bytes())
    else:
        tensors = load_safetensors(path.read_bytes())
    tree: dict[str, Any] = unflatten_dict(  # type: ignore[no-untyped-call]
        {name: jnp.asarray(tensor) for name, tensor in tensors.items()}, sep="/"
    )
    return tree


def classify(scores: npt.ArrayLike) -> int:
    """Return the speaker, 0 to 8, whose score, float [steps, 9], is the highest on average."""
    return int(np.argmax(np.mean(np.asarray(scores, dtype=np.float64), axis=0)))
