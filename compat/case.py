"""One model of a package: as it is served, and as the package itself runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slotstream_worker import StreamModel


@dataclass(frozen=True)
class Case:
    """A served model and its reference.

    Attributes:
        model: what is served.
        whole: the package's own call over one whole stream, `[steps, *sample_shape]` to outputs
            `[steps, ...]`, an array or a mapping of names; nothing of slotstream is in it.
        adapter: which of `slotstream_worker.models` made it.
        streams: `make(rng, steps)` gives a stream's `[steps, *sample_shape]`, where normal values
            or small integers would not do.
    """

    model: StreamModel
    whole: Callable[[Any], Any]
    adapter: str
    streams: Callable[[Any, int], Any] | None = None


Cases = Mapping[str, Callable[[], Case]]
"""Makers by the model's name: one that cannot be served raises `CannotStream`."""
