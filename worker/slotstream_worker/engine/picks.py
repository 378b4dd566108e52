"""What of a frame's outputs a reply carries: every step, one, a reduction, a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Pick = str | Callable[..., Any] | Mapping[str, str | Callable[..., Any]]
"""Words (`"last"`, `"sum argmax"`), or a function of one session's outputs of one frame, or either
by the output's name. A function that takes two arguments is also told how many of the frame's
steps are real; with one that takes one, a session's last frame cannot be a short one."""

Act = Callable[[Any, jax.Array], Any]


@dataclass(frozen=True)
class Picked:
    """What a pick stands for: `act(outputs, steps)` of one session's outputs `[frame, ...]`.

    The first `steps` of the frame are real. `short`: it can be told of fewer than all.
    """

    act: Act
    short: bool = True


def _real(values: jax.Array, steps: jax.Array) -> jax.Array:
    """Which of the frame's steps are real, bool `[frame, 1, ...]`."""
    return (jnp.arange(values.shape[0]) < steps).reshape(-1, *[1] * (values.ndim - 1))


def _last(values: jax.Array, steps: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(values, steps - 1, keepdims=False)


def _sum(values: jax.Array, steps: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(_real(values, steps), values, jnp.zeros((), values.dtype)), axis=0)


def _mean(values: jax.Array, steps: jax.Array) -> jax.Array:
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        values = values.astype(jnp.float32)
    return _sum(values, steps) / steps.astype(values.dtype)


def _max(values: jax.Array, steps: jax.Array) -> jax.Array:
    first = jax.lax.index_in_dim(values, 0, keepdims=True)  # real in every frame
    return jnp.max(jnp.where(_real(values, steps), values, first), axis=0)


def _argmax(values: jax.Array, _steps: jax.Array) -> jax.Array:
    return jnp.argmax(values, axis=-1).astype(jnp.int32)


_WORDS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "all": lambda values, _steps: values,
    "last": _last,
    "mean": _mean,
    "sum": _sum,
    "max": _max,
    "argmax": _argmax,
}
WORDS = tuple(_WORDS)
"""`all` steps (nothing is left out), the `last`, the `mean`, `sum` or `max` over the frame's steps,
`argmax` over the last axis. Several stand in the order in which they act."""


def picked(pick: Pick) -> Picked | None:
    """What a pick stands for; None where everything is sent.

    Raises:
        ValueError: a word that is none.
    """
    if isinstance(pick, Mapping):
        return _by_name({name: picked(one) or Picked(_WORDS["all"]) for name, one in pick.items()})
    if callable(pick):
        return _function(pick)
    words = pick.split()
    if unknown := [word for word in words if word not in _WORDS]:
        raise ValueError(f"outputs= takes {', '.join(WORDS)}, or a function; got {unknown[0]!r}")
    if not words or set(words) == {"all"}:
        return None

    def one_after_another(outputs: Any, steps: jax.Array) -> Any:
        for word in words:
            outputs = jax.tree.map(lambda values, act=_WORDS[word]: act(values, steps), outputs)
        return outputs

    return Picked(one_after_another)


def _function(pick: Callable[..., Any]) -> Picked:
    try:
        inspect.signature(pick).bind(None, None)
    except TypeError:
        return Picked(lambda outputs, _steps: pick(outputs), short=False)
    return Picked(pick)


def _by_name(parts: Mapping[str, Picked]) -> Picked:
    def act(outputs: Any, steps: jax.Array) -> dict[str, Any]:
        if not isinstance(outputs, Mapping):
            raise ValueError("outputs= names several, and the model returns one array")
        if missing := sorted(parts.keys() - outputs.keys()):
            has = ", ".join(map(str, outputs))
            raise ValueError(f"the model has no output {missing[0]!r}; it has {has}")
        return {name: part.act(outputs[name], steps) for name, part in parts.items()}

    return Picked(act, all(part.short for part in parts.values()))
