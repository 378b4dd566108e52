"""brainstate: modules that hold their states as mutable objects; the hard case.

Nothing is handed in or out: `update` writes to `State` objects. `treefy_split` takes them out as a
tree and `treefy_merge` makes a module of them again, so a function with a carry can be written. The
carry is made of bare arrays, since a `TreefyState` remembers whether it has been written, which
makes it another type of tree after the first step. It starts as the states of a batch of one, made
beforehand: brainstate refuses to make states inside of JAX's own transformations.
"""

from typing import Any

import brainstate
import jax
import jax.numpy as jnp
from brainstate import HiddenState, LongTermState, ParamState
from brainstate.graph import treefy_merge, treefy_split

from compat.case import Case, Cases
from slotstream_worker import models

PACKAGE = "brainstate"


def network(make: Any) -> Case:
    """A module, against `brainstate.transform.for_loop` over the whole stream."""

    def made() -> Any:
        brainstate.random.seed(0)
        net = make()
        brainstate.nn.init_all_states(net, 1)
        return net

    def parts(net: Any) -> tuple[Any, Any, Any]:
        return treefy_split(net, ParamState, ...)

    graph, weights, held = parts(made())
    as_tree = jax.tree.structure(held)

    def step(weights: Any, state: Any, frames: jax.Array) -> Any:
        def one(state: Any, x: jax.Array) -> Any:
            net = treefy_merge(graph, weights, jax.tree.unflatten(as_tree, state))
            y = net(x)
            return jax.tree.leaves(parts(net)[2]), y

        return jax.lax.scan(one, state, frames)

    def whole(stream: jax.Array) -> Any:
        net = treefy_merge(graph, weights, held)
        return brainstate.transform.for_loop(net, stream[:, None])[:, 0]

    model = models.carry(
        step, jax.tree.leaves(held), weights, frame=5, sample_shape=(6,), name="brainstate"
    )
    return Case(model, whole, "carry")


class Head(brainstate.nn.Module):
    """A cell and a linear head."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.cell = cell
        self.head = brainstate.nn.Linear(16, 4)

    def update(self, x: jax.Array) -> jax.Array:
        """One time step, `[batch, 6]`."""
        return self.head(self.cell(x))


class Leaky(brainstate.nn.Module):
    """Leaky integrate-and-fire neurons, written as brainstate's users do."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.mix = size, brainstate.nn.Linear(6, size)

    def init_state(self, batch_size: int | None = None, **_: Any) -> None:
        """At rest: zeros."""
        self.v = HiddenState(jnp.zeros((batch_size, self.size)))
        self.count = HiddenState(jnp.zeros((batch_size, self.size), jnp.int32))

    def update(self, x: jax.Array) -> jax.Array:
        """One time step; spikes out."""
        v = 0.9 * self.v.value + self.mix(x)
        spikes = (v > 1.0).astype(v.dtype)
        self.v.value = v - spikes
        self.count.value = self.count.value + spikes.astype(jnp.int32)
        return spikes


class Normed(brainstate.nn.Module):
    """A running mean over all that goes through, whoever's it is: no session has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = LongTermState(jnp.zeros(6))

    def update(self, x: jax.Array) -> jax.Array:
        """One time step."""
        self.mean.value = 0.9 * self.mean.value + 0.1 * x.mean(0)
        return x - self.mean.value


CASES: Cases = {
    "ValinaRNNCell": lambda: network(lambda: Head(brainstate.nn.ValinaRNNCell(6, 16))),
    "GRUCell": lambda: network(lambda: Head(brainstate.nn.GRUCell(6, 16))),
    "MGUCell": lambda: network(lambda: Head(brainstate.nn.MGUCell(6, 16))),
    "LSTMCell": lambda: network(lambda: Head(brainstate.nn.LSTMCell(6, 16))),
    "spiking module": lambda: network(lambda: Leaky(12)),
    "module with a mean over the batch": lambda: network(Normed),
}
