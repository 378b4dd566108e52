"""Equinox: its recurrent cells, and a module of one's own with a step."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from compat.case import Case, Cases
from slotstream_worker import models

PACKAGE = "equinox"
KEY = jax.random.key(3)


def cell(kind: Any, state: Any) -> Case:
    """A cell, scanned as Equinox's own examples do."""
    made = kind(6, 16, key=KEY)

    def whole(stream: jax.Array) -> Any:
        def step(h: Any, x: jax.Array) -> Any:
            h = made(x, h)
            return h, h[0] if isinstance(h, tuple) else h

        return jax.lax.scan(step, state, stream)[1]

    return Case(models.equinox(made, state, frame=5, sample_shape=(6,)), whole, "equinox")


class Classifier(eqx.Module):
    """A GRU and a linear head; `step` takes one time step."""

    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(6, 16, key=first)
        self.head = eqx.nn.Linear(16, 4, key=second)
        self.norm = eqx.nn.LayerNorm(16)

    def step(self, h: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """One time step `[6]`."""
        h = self.cell(x, h)
        return h, {"scores": self.head(self.norm(h)), "class": jnp.argmax(self.head(h))}


def module() -> Case:
    """The classifier, against its own scan."""
    made, start = Classifier(KEY), jnp.zeros(16)
    model = models.equinox(made, start, Classifier.step, frame=5, sample_shape=(6,))

    def whole(stream: jax.Array) -> Any:
        # A function around it, since JAX hashes what it scans, and a module holds arrays.
        def step(h: jax.Array, x: jax.Array) -> Any:
            return made.step(h, x)

        return jax.lax.scan(step, start, stream)[1]

    return Case(model, whole, "equinox")


CASES: Cases = {
    "GRUCell": lambda: cell(eqx.nn.GRUCell, jnp.zeros(16)),
    "LSTMCell": lambda: cell(eqx.nn.LSTMCell, (jnp.zeros(16), jnp.zeros(16))),
    "module with a step": module,
}
