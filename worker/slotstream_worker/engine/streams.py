"""Does a model stream? Found by running it, since no shape shows it.

A session's outputs must be those of one call over its whole stream. Two things break that: a
model whose outputs look ahead (it mixes time steps), and one that forgets (its past is not all
in its state).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slotstream_worker.engine.errors import CannotStream
from slotstream_worker.engine.model import StreamModel, named

BATCH = 2
TRIES = 3
"""A spike may flip where two compiled shapes round differently, so one disagreement is no proof;
a model that cannot stream disagrees every time."""


def check_streams(model: StreamModel) -> None:
    """Raise `CannotStream` where two frames in a row do not give what one call over both gives."""
    reasons = [reason for seed in range(TRIES) if (reason := _disagreement(model, seed))]
    if len(reasons) == TRIES:
        raise CannotStream(f"{model.name} cannot be served: {reasons[0]}")


def _disagreement(model: StreamModel, seed: int) -> str | None:
    """How a whole call and its frames differ on random data, None when they agree."""
    run = jax.jit(model.apply)
    rng = np.random.default_rng(seed)
    each = model.random_frames(rng, (BATCH, 2))
    steps = each.reshape(BATCH, 2 * model.frame, *model.sample_shape)
    frames = jnp.moveaxis(jnp.asarray(steps), 0, 1)
    first, second = frames[: model.frame], frames[model.frame :]
    try:
        whole, _ = run(model.variables, None, frames)
    except Exception as error:
        return (
            f"it takes {model.frame} time steps but not {2 * model.frame} "
            f"({type(error).__name__}: {error}), so it has no outputs over a whole stream "
            "that its frames could equal"
        )
    begun, state = run(model.variables, None, first)
    went_on, _ = run(model.variables, state, second)
    for name, output in named(whole).items():
        if output.shape[0] != 2 * model.frame:
            return f"its output {name!r} does not grow with the time steps"
        if not _close(output[: model.frame], named(begun)[name]):
            return (
                f"it mixes time steps: its output {name!r} at the first {model.frame} steps "
                "changes when later steps follow, so it cannot run before they have come"
            )
        if not _close(output[model.frame :], named(went_on)[name]):
            return (
                f"its output {name!r} over two frames in a row is not that of one call over "
                "both: it mixes time steps, or some of what it remembers is not in its state"
            )
    return None


def _close(whole: Any, parts: Any) -> bool:
    """Equal but for rounding: two compiled shapes may sum in another order."""
    a, b = np.asarray(whole), np.asarray(parts)
    if a.dtype.kind in "biu":
        return bool((a == b).all())
    tolerance = 1e-8 if a.dtype in (np.float64, np.complex128) else 2e-3
    if a.dtype.itemsize <= 2:
        tolerance = 5e-2
    kind = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(kind), b.astype(kind)
    scale = max(float(np.nanmax(np.abs(a), initial=0.0)), 1e-6)
    return bool(np.allclose(a, b, rtol=0.0, atol=tolerance * scale, equal_nan=True))
