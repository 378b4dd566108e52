"""Models that the tests serve: small, but of every kind that streams."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from slotstream_worker import StreamModel, models


class LIF(nn.Module):
    """Leaky integrate-and-fire neurons, `[steps, batch, ...]` in and spikes out; keeps `v`."""

    tau: float = 3.0
    threshold: float = 0.4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        v = self.variable("state", "v", jnp.zeros, x.shape[1:], x.dtype)

        def step(v: jax.Array, current: jax.Array) -> tuple[jax.Array, jax.Array]:
            v = v + (current - v) / jnp.asarray(self.tau, x.dtype)
            spikes = (v > jnp.asarray(self.threshold, x.dtype)).astype(x.dtype)
            return v * (1 - spikes), spikes

        v.value, spikes = jax.lax.scan(step, v.value, x)
        return spikes


class LI(nn.Module):
    """Leaky integrator: a readout that keeps its membrane `u`."""

    tau: float = 4.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        u = self.variable("state", "u", jnp.zeros, x.shape[1:], x.dtype)

        def step(u: jax.Array, current: jax.Array) -> tuple[jax.Array, jax.Array]:
            u = u + (current - u) / jnp.asarray(self.tau, x.dtype)
            return u, u

        u.value, out = jax.lax.scan(step, u.value, x)
        return out


class RecurrentLIF(nn.Module):
    """LIF neurons whose spikes of the step before come back through a dense layer."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (x.shape[1], self.features)
        v = self.variable("state", "v", jnp.zeros, shape, x.dtype)
        s = self.variable("state", "s", jnp.zeros, shape, jnp.bool_)
        weights = self.param("w", nn.initializers.normal(0.5), (self.features,) * 2, x.dtype)

        def step(carry: Any, current: jax.Array) -> Any:
            v, s = carry
            v = v + (current + s.astype(x.dtype) @ weights - v) / jnp.asarray(3, x.dtype)
            s = v > jnp.asarray(0.4, x.dtype)
            return (jnp.where(s, jnp.zeros_like(v), v), s), s.astype(x.dtype)

        (v.value, s.value), spikes = jax.lax.scan(step, (v.value, s.value), x)
        return spikes


class Delayed(nn.Module):
    """A line of delays: the inputs of the last `steps` steps are the state, `[steps, B, ...]`."""

    steps: int = 3

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        past = self.variable("state", "past", jnp.zeros, (self.steps, *x.shape[1:]), x.dtype)
        line = jnp.concatenate([past.value, x])
        past.value = line[len(x) :]
        taps = self.param("taps", nn.initializers.normal(1.0), (self.steps + 1,), x.dtype)
        parts = [
            taps[k] * line[self.steps - k : self.steps - k + len(x)] for k in range(self.steps + 1)
        ]
        return sum(parts[1:], parts[0])


def _dense(n: int, x: jax.Array) -> nn.Dense:
    return nn.Dense(n, dtype=x.dtype, param_dtype=x.dtype)


class SpikingMLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = LIF()(_dense(16, x)(x))
        return LI()(_dense(3, x)(x))


class RecurrentMLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        spikes = RecurrentLIF(12)(_dense(12, x)(x))
        return {"scores": LI()(_dense(3, x)(spikes)), "spikes": spikes.astype(jnp.uint8)}


class DelayedMLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return LI()(_dense(3, x)(LIF()(Delayed()(_dense(8, x)(x)))))


class ConvNet(nn.Module):
    """A spiking convolutional net; takes `train`, which must be False."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        steps, batch = x.shape[:2]
        y = x.reshape(steps * batch, *x.shape[2:])
        y = nn.Conv(4, (3, 3), dtype=x.dtype, param_dtype=x.dtype)(y)
        y = nn.BatchNorm(use_running_average=not train, dtype=x.dtype, param_dtype=x.dtype)(y)
        y = LIF(threshold=0.1)(y.reshape(steps, batch, *y.shape[1:]))
        y = y.reshape(steps, batch, -1)
        return LI()(_dense(3, y)(y))


class Scaled(nn.Module):
    """SpikingMLP with a readout scaled by a keyword that every call needs."""

    @nn.compact
    def __call__(self, x: jax.Array, scale: float) -> jax.Array:
        return SpikingMLP()(x) * jnp.asarray(scale, x.dtype)


def scaled_up(variables: Any, factor: float = 2.0) -> Any:
    """Weights large enough that neurons fire; everything but the state."""
    return {
        name: jax.tree.map(lambda w: w * jnp.asarray(factor, w.dtype), tree)
        for name, tree in variables.items()
        if name != "state"
    }


def linen_model(
    module: nn.Module,
    sample: tuple[int, ...],
    *,
    frame: int = 5,
    dtype: Any = np.float32,
    call: dict[str, Any] | None = None,
) -> StreamModel:
    """A linen module with weights of seed 0."""
    extra = {"train": False} if isinstance(module, ConvNet) else {}
    variables = module.init(
        jax.random.key(0), jnp.zeros((1, 1, *sample), dtype), **extra, **(call or {})
    )
    return models.linen(
        module, scaled_up(variables), frame=frame, sample_shape=sample, dtype=dtype, call=call
    )


def cell_model(
    cell: nn.RNNCellBase, features: int, *, frame: int = 5, dtype: Any = np.float32
) -> StreamModel:
    """A Flax RNN cell, scanned over the frame."""
    start = cell.initialize_carry(jax.random.key(0), (1, features))
    start = jax.tree.map(lambda leaf: leaf.astype(dtype), start)
    variables = cell.init(jax.random.key(1), start, jnp.zeros((1, features), dtype))

    def step(variables: Any, carry: Any, frames: jax.Array) -> Any:
        return jax.lax.scan(lambda c, x: cell.apply(variables, c, x), carry, frames)

    return models.carry(
        step,
        start,
        variables,
        frame=frame,
        sample_shape=(features,),
        dtype=dtype,
        name=type(cell).__name__,
    )


def gru(dtype: Any = np.float32) -> StreamModel:
    return cell_model(nn.GRUCell(7, dtype=dtype, param_dtype=dtype), 4, dtype=dtype)


def lstm(dtype: Any = np.float32) -> StreamModel:
    return cell_model(nn.OptimizedLSTMCell(7, dtype=dtype, param_dtype=dtype), 4, dtype=dtype)


def filters(dtype: Any = np.float32) -> StreamModel:
    """A plain function: complex resonators, a step counter and two named outputs."""
    complex_dtype = np.complex64 if dtype == np.float32 else np.complex128

    def step(variables: Any, carry: Any, frames: jax.Array) -> Any:
        def one(c: Any, x: jax.Array) -> Any:
            z, n = c
            z = z * variables["pole"] + (x @ variables["w"]).astype(complex_dtype)
            n = n + 1
            return (z, n), {"energy": jnp.abs(z), "step": n}

        return jax.lax.scan(one, carry, frames)

    rng = np.random.default_rng(3)
    variables = {
        "pole": (0.9 * np.exp(1j * rng.uniform(0, 3, 6))).astype(complex_dtype)[None],
        "w": rng.normal(size=(4, 6)).astype(dtype),
    }
    return models.carry(
        step,
        lambda batch: (jnp.zeros((batch, 6), complex_dtype), jnp.zeros((batch,), jnp.int32)),
        variables,
        frame=5,
        sample_shape=(4,),
        dtype=dtype,
    )


ENGINE_MODELS = {
    "dense": lambda dtype: linen_model(SpikingMLP(), (6,), dtype=dtype),
    "recurrent": lambda dtype: linen_model(RecurrentMLP(), (6,), dtype=dtype),
    "delayed": lambda dtype: linen_model(DelayedMLP(), (6,), dtype=dtype),
    "convolutional": lambda dtype: linen_model(ConvNet(), (6, 6, 1), dtype=dtype),
    "keyword": lambda dtype: linen_model(Scaled(), (6,), dtype=dtype, call={"scale": 2.5}),
    "gru": gru,
    "lstm": lstm,
    "function": filters,
}


def served() -> StreamModel:
    """What worker processes of the tests serve: recurrent spiking neurons, two outputs."""
    return linen_model(RecurrentMLP(), (6,), frame=4)


def direct(model: StreamModel, stream: Any) -> dict[str, np.ndarray[Any, Any]]:
    """One call of the model over a whole stream `[steps, *sample]`, by output name."""
    from slotstream_worker.engine.model import named

    outputs, _ = jax.jit(model.apply)(model.variables, None, jnp.asarray(stream)[:, None])
    return {name: np.asarray(array)[:, 0] for name, array in named(outputs).items()}


def deadly() -> StreamModel:
    """Like `served`, but a frame with a value above a million ends the process that runs it."""
    calm = served()

    def apply(variables: Any, state: Any, frames: jax.Array) -> Any:
        def die(_: Any) -> np.ndarray[Any, Any]:
            os._exit(9)

        shape = jax.ShapeDtypeStruct((), np.int32)
        dead = jax.lax.cond(
            jnp.any(frames > 1e6),
            lambda x: io_callback(die, shape, x),
            lambda _x: jnp.zeros((), np.int32),
            jnp.zeros((), np.int32),
        )
        outputs, after = calm.apply(variables, state, frames)
        return {**outputs, "scores": outputs["scores"] + dead.astype(np.float32)}, after

    return dataclasses.replace(calm, apply=apply)
