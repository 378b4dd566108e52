"""A cell written by hand: a Legendre Memory Unit, one example, one step, plain JAX.

    python examples/lmu.py
    slotstream worker --model examples.lmu:model

Voelker, Kajic and Eliasmith 2019, "Legendre Memory Units: Continuous-Time Representation in
Recurrent Neural Networks", NeurIPS 32. The cell knows neither batches nor frames; `models.example`
maps it over sessions and scans it over a frame. The streams are three-axis accelerometers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slotstream_worker import StreamModel, models

AXES, ORDER, HIDDEN, WINDOW = 3, 8, 24, 50.0  # WINDOW: steps that the memory holds


def memory() -> tuple[np.ndarray, np.ndarray]:
    """The delay's state space (A, B), discretised by the exponential (zero-order hold)."""
    i, j = np.meshgrid(np.arange(ORDER), np.arange(ORDER), indexing="ij")
    a = np.where(i < j, -1.0, (-1.0) ** (i - j + 1)) * (2 * i + 1) / WINDOW
    b = (2 * np.arange(ORDER) + 1) * (-1.0) ** np.arange(ORDER) / WINDOW
    values, vectors = np.linalg.eig(a)
    discrete = (vectors * np.exp(values)) @ np.linalg.inv(vectors)
    return discrete.real, np.linalg.solve(a, (discrete.real - np.eye(ORDER)) @ b)


def variables() -> dict[str, jax.Array]:
    """The memory's matrices and random weights."""
    a, b = memory()
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {
        "x_u": (AXES,),
        "h_u": (HIDDEN,),
        "x_h": (AXES, HIDDEN),
        "h_h": (HIDDEN, HIDDEN),
        "m_h": (ORDER, HIDDEN),
    }
    drawn = {
        name: jax.random.normal(key, shape) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return {"a": jnp.asarray(a, jnp.float32), "b": jnp.asarray(b, jnp.float32), **drawn}


REST = {"memory": jnp.zeros(ORDER), "hidden": jnp.zeros(HIDDEN), "steps": jnp.int32(0)}


def cell(w: dict[str, jax.Array], state: Any, x: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
    """One step of one example: x `[3]` to its hidden vector, and how far the memory is filled."""
    u = x @ w["x_u"] + state["hidden"] @ w["h_u"]
    m = w["a"] @ state["memory"] + w["b"] * u
    h = jnp.tanh(x @ w["x_h"] + state["hidden"] @ w["h_h"] + m @ w["m_h"])
    steps = state["steps"] + 1
    filled = jnp.minimum(steps / WINDOW, 1.0)
    return {"memory": m, "hidden": h, "steps": steps}, {"hidden": h, "filled": filled}


def model() -> StreamModel:
    """Serve it: ten samples a frame."""
    return models.example(
        cell, REST, variables(), frame=10, sample_shape=(AXES,), per_step=True, name="LMU"
    )


def direct(stream: np.ndarray) -> dict[str, jax.Array]:
    """The cell scanned over a whole stream."""
    weights = variables()
    return jax.lax.scan(lambda s, x: cell(weights, s, x), REST, jnp.asarray(stream))[1]


def streams() -> dict[str, np.ndarray]:
    """Accelerations in g at 50 Hz, of things that move differently."""
    gait = {
        "sitting": (0.0, 0.0),
        "walking": (1.8, 0.3),
        "running": (2.8, 0.9),
        "tram": (7.0, 0.05),
    }
    found = {}
    for k, (name, (rate, strength)) in enumerate(gait.items()):
        rng = np.random.default_rng(k)
        phase = 2 * np.pi * np.cumsum(rng.normal(rate / 50, 0.002, 300 + 70 * k))
        swing = np.stack([np.sin(phase / 2), np.cos(phase), np.maximum(np.sin(phase), -0.3)], 1)
        found[name] = (strength * swing + [0, 0, 1] + rng.normal(0, 0.02, swing.shape)).astype("f4")
    return found


if __name__ == "__main__":
    from serve import demonstrate

    demonstrate(model(), streams(), direct)
