"""What of a frame's outputs a reply carries: every step, one, a reduction, a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Pick = str | Callable[[Any], Any] | Mapping[str, str | Callable[[Any], Any]]
"""Words (`"last"`, `"sum argmax"`), or a function of one session's outputs of one frame, or either
by the output's name."""

Picked = Callable[[Any], Any]
"""One session's outputs of a frame `[frame, ...]`, one array or a mapping, to what is sent."""

_WORDS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all": lambda steps: steps,
    "last": lambda steps: steps[-1],
    "mean": lambda steps: jnp.mean(steps, axis=0),
    "sum": lambda steps: jnp.sum(steps, axis=0),
    "max": lambda steps: jnp.max(steps, axis=0),
    "argmax": lambda values: jnp.argmax(values, axis=-1).astype(jnp.int32),
}
WORDS = tuple(_WORDS)
"""`all` steps (nothing is left out), the `last`, the `mean`, `sum` or `max` over the frame's steps,
`argmax` over the last axis. Several stand in the order in which they act."""


def picked(pick: Pick) -> Picked | None:
    """The function that a pick stands for; None where everything is sent.

    Raises:
        ValueError: a word that is none.
    """
    if isinstance(pick, Mapping):
        parts = {name: picked(one) or _WORDS["all"] for name, one in pick.items()}

        def by_name(outputs: Any) -> dict[str, Any]:
            if not isinstance(outputs, Mapping):
                raise ValueError("outputs= names several, and the model returns one array")
            if missing := sorted(parts.keys() - outputs.keys()):
                has = ", ".join(map(str, outputs))
                raise ValueError(f"the model has no output {missing[0]!r}; it has {has}")
            return {name: part(outputs[name]) for name, part in parts.items()}

        return by_name
    if callable(pick):
        return pick
    words = pick.split()
    if unknown := [word for word in words if word not in _WORDS]:
        raise ValueError(f"outputs= takes {', '.join(WORDS)}, or a function; got {unknown[0]!r}")
    if not words or set(words) == {"all"}:
        return None

    def one_after_another(outputs: Any) -> Any:
        for word in words:
            outputs = jax.tree.map(_WORDS[word], outputs)
        return outputs

    return one_after_another
