"""What a load pushes: some thousand frames, encoded once, that every session draws from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slotstream.bursts import Frames
from slotstream.codec import Array
from slotstream.errors import BadFrame
from slotstream.named import AnyFrames, NamedFrames, frames_of
from slotstream.pushing import cut

_MOST_FRAMES, _MOST_BYTES, _LEAST_FRAMES = 8192, 64 * 2**20, 16


class Samples:
    """Frames of one app in a ring.

    Args:
        codec: of the app's frames.
        frames: `[n, frame, *sample_shape]`, or as many mappings of a model's several inputs;
            raises `BadFrame` where they do not fit.
    """

    def __init__(self, codec: AnyFrames, frames: Any) -> None:
        self._datas = codec.datas(frames)
        self._before = Frames.before_data(codec.header, codec.size - len(codec.header))
        if not self._datas:
            raise ValueError("there are no frames to push")

    def __len__(self) -> int:
        return len(self._datas)

    def take(self, start: int, count: int) -> Frames:
        """`count` frames from the `start`-th on, in a ring."""
        start %= len(self._datas)
        datas = self._datas[start : start + count]
        while len(datas) < count:
            datas += self._datas[: count - len(datas)]
        return Frames(self._before, datas)


def from_file(file: Path, config: dict[str, str]) -> Samples:
    """The frames of a .npy file, or its time steps cut into frames of the app's length."""
    codec, array = frames_of(config), np.load(file, allow_pickle=False)
    if isinstance(codec, NamedFrames):
        raise BadFrame("shape", f"this app takes several inputs ({codec.name}); a .npy has one")
    return Samples(codec, cut(array, config, None))


def at_random(config: dict[str, str], seed: int) -> Samples:
    """Random frames: normal, or for whole numbers and bools uniform over small ones."""
    codec = frames_of(config)
    frames = min(_MOST_FRAMES, max(_LEAST_FRAMES, _MOST_BYTES // max(codec.nbytes, 1)))
    rng = np.random.default_rng(seed)
    if isinstance(codec, NamedFrames):
        each = {
            name: _values(rng, part.dtype, (frames, *part.shape))
            for name, part in codec.parts.items()
        }
        return Samples(codec, [{name: a[k] for name, a in each.items()} for k in range(frames)])
    return Samples(codec, _values(rng, codec.dtype, (frames, *codec.shape)))


def _values(rng: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if dtype.kind == "b":
        return rng.integers(0, 2, shape, np.uint8).astype(dtype)
    if dtype.kind in "iu":
        low, high = max(int(np.iinfo(dtype).min), -128), min(int(np.iinfo(dtype).max), 127)
        return rng.integers(low, high + 1, shape, dtype)
    if dtype.kind == "c":
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    values = rng.standard_normal(shape, np.float32)
    if dtype.name == "float8_e8m0fnu":  # it has no sign
        values = np.abs(values)
    return values.astype(dtype)
