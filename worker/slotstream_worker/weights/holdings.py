"""The published versions that a worker holds, as others may ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from slotstream_worker.weights.boxes import Box
from slotstream_worker.weights.layout import Layout
from slotstream_worker.weights.manifest import Manifest


@dataclass(frozen=True)
class Held:
    """A version on the device: its manifest, the leaf of each tensor, the variables."""

    manifest: Manifest
    leaf_of: Mapping[str, str]
    variables: Any
    arrays: dict[str, jax.Array] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest, leaf_of: Mapping[str, str], variables: Any) -> Held:
        """With the arrays found by the leaf's name."""
        names = [leaf.name for leaf in Layout.of(variables).leaves]
        arrays = dict(zip(names, jax.tree.leaves(variables), strict=True))
        return cls(manifest, leaf_of, variables, arrays)


class Holdings:
    """Versions by name. One thread adds and drops; any may read."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def add(self, version: str, held: Held) -> None:
        """It is on the device."""
        self._held = {**self._held, version: held}

    def drop(self, version: str) -> None:
        """It is not any more."""
        self._held = {name: held for name, held in self._held.items() if name != version}

    def has(self, version: str) -> bool:
        """Whether it is here."""
        return version in self._held

    def versions(self) -> list[str]:
        """All of them."""
        return list(self._held)

    def provide(self, version: str, tensor: str, box: Box) -> memoryview | None:
        """Bytes of a box of a tensor as it was published; None where they are not here.

        What was cast on the way in is not here as it was published.
        """
        held = self._held.get(version)
        if held is None or tensor not in held.leaf_of:
            return None
        array = held.arrays[held.leaf_of[tensor]]
        published = next(t for t in held.manifest.tensors if t.name == tensor)
        if np.dtype(array.dtype) != published.numpy or not box.within(published.shape):
            return None
        if not array.is_fully_addressable:
            return None
        part = np.ascontiguousarray(np.asarray(array)[box.slices]).reshape(-1)
        return part.view(np.uint8).data if part.size else memoryview(b"")
