"""mamba2-jax: an nnx Mamba-2 that takes and returns its caches, a convolution's and an SSM's."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from mamba2_jax import (
    Mamba2Config,
    Mamba2ForCausalLM,
    Mamba2Forecaster,
    create_empty_cache,
    create_random_forecaster,
)

from compat.case import Case, Cases
from slotstream_worker import models

PACKAGE = "mamba2-jax"
CONFIG = Mamba2Config(
    vocab_size=96, hidden_size=32, state_size=8, head_dim=8, chunk_size=8, num_hidden_layers=2
)


def language() -> Case:
    """The language model, a token a step, against its own call without a cache."""
    graph, weights = nnx.split(Mamba2ForCausalLM(CONFIG, rngs=nnx.Rngs(0)))

    def step(weights: Any, cache: Any, tokens: jax.Array) -> Any:
        found = nnx.merge(graph, weights)(tokens.T, cache=cache)
        return found["cache"], jnp.moveaxis(found["logits"], 0, 1)

    def whole(tokens: jax.Array) -> Any:
        return Mamba2ForCausalLM(CONFIG, rngs=nnx.Rngs(0))(tokens[None])["logits"][0]

    model = models.carry(
        step,
        lambda batch: create_empty_cache(CONFIG, batch),
        weights,
        frame=4,
        sample_shape=(),
        dtype="int32",
        name="Mamba2ForCausalLM",
    )
    return Case(model, whole, "carry", lambda rng, steps: rng.integers(0, 96, steps))


def forecaster() -> Case:
    """The forecaster has one output a whole sequence, and keeps no cache."""
    net: Mamba2Forecaster = create_random_forecaster(
        input_dim=3, d_model=32, n_layers=2, output_dim=1, forecast_horizon=6
    )
    model = models.nnx(net, frame=4, sample_shape=(3,), batch_major=True)
    return Case(model, lambda stream: net(stream[None])[0], "nnx")


CASES: Cases = {"Mamba2ForCausalLM": language, "Mamba2Forecaster": forecaster}
