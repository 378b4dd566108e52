"""Models with several named inputs: frames of bytes, which are taken apart on the device.

A frame of such a model is `uint8 [frame, step]`, as `slotstream.named` packs it: then everything
between the wire and the model handles one array, whatever the model takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slotstream import named


@dataclass(frozen=True)
class Input:
    """One named input: `shape` is that of one time step of one session."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of one time step."""
        return prod(self.shape) * self.dtype.itemsize


def inputs_of(shapes: Mapping[str, tuple[int, ...]], dtypes: Any) -> tuple[Input, ...]:
    """The inputs in the order of their names; `dtypes` is one for all, or one by name.

    Raises:
        ValueError: an input without a dtype, or a dtype without an input.
    """
    if isinstance(dtypes, Mapping) and dtypes.keys() != shapes.keys():
        raise ValueError(
            f"sample_shape names {', '.join(sorted(shapes))}, and dtype {', '.join(sorted(dtypes))}"
        )
    return tuple(
        Input(name, tuple(int(n) for n in shape),
              np.dtype(dtypes[name] if isinstance(dtypes, Mapping) else dtypes))
        for name, shape in sorted(shapes.items())
    )  # fmt: skip


def unpack(inputs: tuple[Input, ...], frames: jax.Array) -> dict[str, jax.Array]:
    """Arrays `[steps, batch, *sample_shape]` by name from bytes `[steps, batch, step]`."""
    found, at = {}, 0
    for one in inputs:
        data = frames[..., at : at + one.nbytes]
        at += one.nbytes
        found[one.name] = _typed(data, one.dtype).reshape(*frames.shape[:-1], *one.shape)
    return found


def _typed(data: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Bytes `[..., n * itemsize]` as values `[..., n]`."""
    if dtype == np.bool_:
        return data != 0
    if dtype.kind == "c":
        part = np.dtype(f"float{4 * dtype.itemsize}")
        pairs = _typed(data, part).reshape(*data.shape[:-1], -1, 2)
        return jax.lax.complex(pairs[..., 0], pairs[..., 1])
    if dtype.itemsize > 1:
        data = data.reshape(*data.shape[:-1], -1, dtype.itemsize)
    return jax.lax.bitcast_convert_type(data, jnp.dtype(dtype))


def pack(inputs: tuple[Input, ...], arrays: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Bytes `[..., step]` of arrays `[..., *sample_shape]` by name; inverse of `unpack`."""
    return named.pack([(one.name, one.dtype, one.shape) for one in inputs], arrays)
