"""RecurrentGemma: Griffin's recurrent block (an RG-LRU behind a short convolution), in linen."""

from typing import Any

import jax
import jax.numpy as jnp
from recurrentgemma.jax.modules import RecurrentBlock

from compat.case import Case, Cases
from slotstream_worker import CannotStream, models

PACKAGE = "recurrentgemma"
WIDTH = 16


def block(**settings: Any) -> Case:
    """The block, against its own call over the whole stream without a cache.

    It wants to be told where each step stands in its sequence; 0 starts one. So a session's state
    is the block's cache, and how many steps there have been.
    """
    net = RecurrentBlock(width=WIDTH, num_heads=2, **settings)
    zeros = jnp.zeros((1, 4, WIDTH))
    variables = net.init(jax.random.key(0), zeros, jnp.arange(4)[None])

    own_steps(net, variables)

    def start(batch: int) -> Any:
        empty = RecurrentBlock.init_cache(batch, WIDTH, jnp.float32)
        return {"cache": empty, "seen": jnp.zeros(batch, jnp.int32)}

    def step(weights: Any, state: Any, frames: jax.Array) -> Any:
        # The block takes either one step from a cache, or a whole sequence from none.
        def one(state: Any, x: jax.Array) -> Any:
            at = state["seen"][:, None]
            y, cache = net.apply(weights, x[:, None], at, state["cache"])
            return {"cache": cache, "seen": state["seen"] + 1}, y[:, 0]

        return jax.lax.scan(one, state, frames)

    def whole(stream: jax.Array) -> Any:
        positions = jnp.arange(stream.shape[0])[None]
        return net.apply(variables, stream[None], positions, return_cache=False)[0][0]

    model = models.carry(
        step, start, variables, frame=5, sample_shape=(WIDTH,), name="RecurrentBlock"
    )
    return Case(model, whole, "carry")


def own_steps(net: RecurrentBlock, variables: Any) -> None:
    """Raise where the block's own steps from its own cache are not its own call over the whole."""
    x = jax.random.normal(jax.random.key(1), (1, 12, WIDTH))
    whole, _ = net.apply(variables, x, jnp.arange(12)[None])
    _, cache = net.apply(variables, x[:, :6], jnp.arange(6)[None])
    farthest = 0.0
    for t in range(6, 12):
        y, cache = net.apply(variables, x[:, t : t + 1], jnp.array([[t]]), cache)
        farthest = max(farthest, float(jnp.max(jnp.abs(y[:, 0] - whole[:, t]))))
    if farthest > 1e-4 * float(jnp.max(jnp.abs(whole))):
        raise CannotStream(
            "RecurrentBlock cannot be served: its own steps, from the cache that it gave itself, "
            f"differ by {farthest:.2g} from its own call over the whole sequence"
        )


CASES: Cases = {
    "RecurrentBlock": block,
    "RecurrentBlock, complex": lambda: block(lru_only_real=False),
}
