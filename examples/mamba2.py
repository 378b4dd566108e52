"""A small Mamba-2, written out: two caches a layer, the convolution's window and the SSM's state.

    python examples/mamba2.py
    slotstream worker --model examples.mamba2:model

Dao and Gu 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through
Structured State Space Duality", ICML; one group, heads of equal width. It is served in its
recurrent form; `direct` is the form that one trains, which has no loop over time: a convolution
over the whole stream and a masked matrix between all pairs of steps. The streams are heartbeats.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slotstream_worker import StreamModel, models

LEADS, WIDTH, HEADS, STATE, WINDOW, LAYERS = 2, 16, 4, 8, 4, 2
HEAD = 2 * WIDTH // HEADS  # the block works at twice the width
MIXED = 2 * WIDTH + 2 * STATE  # what the convolution sees: x, B and C


def variables() -> dict[str, Any]:
    """Random weights, drawn as the paper's initialisation has them."""
    keys = iter(jax.random.split(jax.random.key(0), 3 * LAYERS + 2))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    def block() -> dict[str, Any]:
        return {
            "norm": jnp.ones(WIDTH),
            "in": normal(WIDTH, 2 * WIDTH + MIXED + HEADS),
            "conv": normal(WINDOW, MIXED),
            "conv_bias": jnp.zeros(MIXED),
            # Steps of 0.001 to 0.1, spread evenly in log; softplus of these biases.
            "dt_bias": jnp.log(jnp.expm1(jnp.geomspace(1e-3, 1e-1, HEADS))),
            "a_log": jnp.log(jnp.linspace(1.0, 16.0, HEADS)),
            "d": jnp.ones(HEADS),
            "gate_norm": jnp.ones(2 * WIDTH),
            "out": normal(2 * WIDTH, WIDTH),
        }

    blocks = [block() for _ in range(LAYERS)]
    return {"embed": normal(LEADS, WIDTH), "blocks": blocks, "head": normal(WIDTH, 3)}


def rest(batch: int) -> list[dict[str, jax.Array]]:
    """Empty caches of each layer. The window holds the inputs before this one."""
    return [
        {
            "conv": jnp.zeros((batch, WINDOW - 1, MIXED)),
            "ssm": jnp.zeros((batch, HEADS, HEAD, STATE)),
        }
        for _ in range(LAYERS)
    ]


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root mean square normalisation."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale


def before(w: dict[str, Any], h: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The input projection, `[..., width]`: the gate, what is convolved, and the step sizes."""
    gate, mixed, dt = jnp.split(
        norm(h, w["norm"]) @ w["in"], [2 * WIDTH, 2 * WIDTH + MIXED], axis=-1
    )
    return gate, mixed, jax.nn.softplus(dt + w["dt_bias"])


def heads_of(mixed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What was convolved, as x `[..., heads, head]`, B and C `[..., state]`."""
    x, b, c = jnp.split(jax.nn.silu(mixed), [2 * WIDTH, 2 * WIDTH + STATE], axis=-1)
    return x.reshape(*x.shape[:-1], HEADS, HEAD), b, c


def after(w: dict[str, Any], h: jax.Array, y: jax.Array, x: jax.Array, gate: Any) -> jax.Array:
    """The skip, the gated norm, the output projection and the residual."""
    y = (y + w["d"][:, None] * x).reshape(*gate.shape)
    return h + norm(y * jax.nn.silu(gate), w["gate_norm"]) @ w["out"]


def step(weights: dict[str, Any], caches: Any, frames: jax.Array) -> tuple[Any, jax.Array]:
    """Map frames `[frame, batch, leads]` to scores `[frame, batch, 3]`, a step at a time."""

    def one(caches: Any, sample: jax.Array) -> tuple[Any, jax.Array]:
        h, kept = sample @ weights["embed"], []
        for w, cache in zip(weights["blocks"], caches, strict=True):
            gate, mixed, dt = before(w, h)
            window = jnp.concatenate([cache["conv"], mixed[:, None]], axis=1)
            x, b, c = heads_of(jnp.einsum("bkc,kc->bc", window, w["conv"]) + w["conv_bias"])
            decay = jnp.exp(-dt * jnp.exp(w["a_log"]))
            ssm = decay[..., None, None] * cache["ssm"] + jnp.einsum("bh,bhp,bn->bhpn", dt, x, b)
            h = after(w, h, jnp.einsum("bhpn,bn->bhp", ssm, c), x, gate)
            kept.append({"conv": window[:, 1:], "ssm": ssm})
        return kept, h @ weights["head"]

    return jax.lax.scan(one, caches, frames)


def model() -> StreamModel:
    """Serve it: sixteen samples a frame."""
    return models.carry(step, rest, variables(), frame=16, sample_shape=(LEADS,), name="Mamba-2")


def direct(stream: np.ndarray) -> jax.Array:
    """The same network over a whole stream `[steps, leads]` at once, without a state."""
    weights = variables()
    h = jnp.asarray(stream) @ weights["embed"]
    for w in weights["blocks"]:
        gate, mixed, dt = before(w, h)
        padded = jnp.pad(mixed, ((WINDOW - 1, 0), (0, 0)))
        taps = [padded[k : k + len(h)] * w["conv"][k] for k in range(WINDOW)]
        x, b, c = heads_of(sum(taps) + w["conv_bias"])
        # The decay from each step j to each later i is a product, the exponential of a sum.
        total = jnp.cumsum(-dt * jnp.exp(w["a_log"]), axis=0)
        later = jnp.tril(jnp.ones((len(h), len(h)), bool))[..., None]
        decay = jnp.exp(jnp.where(later, total[:, None] - total[None], -jnp.inf))
        h = after(w, h, jnp.einsum("in,jn,ijh,jh,jhp->ihp", c, b, decay, dt, x), x, gate)
    return h @ weights["head"]


def streams() -> dict[str, np.ndarray]:
    """Two leads at 100 Hz: the waves of a heart at several rates, drifting, with mains hum."""
    found = {}
    waves = ((-0.20, 0.025, 0.15), (-0.03, 0.01, -0.1), (0, 0.011, 1.0), (0.27, 0.04, 0.3))
    for k, rate in enumerate((48, 62, 75, 110, 140)):
        rng = np.random.default_rng(k)
        seconds = np.arange(320 + 64 * k) / 100
        beats = np.cumsum(rng.normal(60 / rate, 0.03, 40))
        ecg = sum(
            height * np.exp(-((seconds[:, None] - beats - at) ** 2) / (2 * width**2)).sum(1)
            for at, width, height in waves
        )
        hum = 0.03 * np.sin(2 * np.pi * 50.3 * seconds) + 0.1 * np.sin(0.6 * np.pi * seconds)
        noisy = ecg[:, None] * [1.0, 0.6] + hum[:, None] + rng.normal(0, 0.01, (len(seconds), 2))
        found[f"heart-{rate}-bpm"] = noisy.astype(np.float32)
    return found


if __name__ == "__main__":
    from serve import demonstrate

    demonstrate(model(), streams(), direct)
