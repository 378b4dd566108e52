"""Frames of several named arrays, for models with more than one input.

frames = NamedFrames({"audio": ("float32", (40,)), "active": ("bool", ())}, frame=10)
raw = frames.encode({"audio": a, "active": b})
arrays = frames.decode(raw)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from slotstream.codec import MAX_FRAME_BYTES, Array, FrameCodec, decode, encode
from slotstream.errors import BadFrame

Inputs = Mapping[str, tuple[str, tuple[int, ...]]]
"""dtype and sample shape of each input, by name."""


class NamedFrames:
    """Frames that are a map of names to arrays, each of one dtype and `[frame, *sample_shape]`.

    For a worker a frame is one array of bytes `[frame, step]`: step by step, the arrays in the
    order of their names. So it is taken along like any other; the model takes it apart.
    """

    def __init__(self, inputs: Inputs, frame: int, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.inputs = dict(sorted(inputs.items()))
        self.max_bytes = max_bytes
        self.parts = {
            name: FrameCodec(dtype, (frame, *shape), max_bytes=max_bytes)
            for name, (dtype, shape) in self.inputs.items()
        }
        self.dtype: np.dtype[np.generic] = np.dtype(np.uint8)
        self.shape = (frame, sum(part.nbytes // frame for part in self.parts.values()))
        self.nbytes = prod(self.shape)
        self.name = ", ".join(
            f"{name} {part.name}{list(part.shape)}" for name, part in self.parts.items()
        )
        self.header = b""
        map_header = msgpack.Packer().pack_map_header(len(self.parts))
        heads, at, before = [], 0, map_header
        self._places: list[tuple[int, int]] = []
        for name, part in self.parts.items():
            head = before + msgpack.packb(name) + part.header
            heads.append((at, head))
            self._places.append((at + len(head), part.nbytes))
            at, before = at + len(head) + part.nbytes, b""
        self.size = at
        """Bytes of an encoded frame."""
        self._heads = [(start, np.frombuffer(head, np.uint8)) for start, head in heads]
        if self.size > max_bytes:
            raise BadFrame(
                "too_large",
                f"one frame takes {self.size} bytes, more than the limit of {max_bytes}",
            )

    @property
    def described(self) -> str:
        """Dtype and shape of each input, for a message."""
        return self.name

    def encode(self, arrays: Mapping[str, Array], *, last: bool = False) -> bytes:
        """Encode one frame; raises `BadFrame` where names, dtypes or shapes are others.

        Args:
            arrays: by name, each `[frame, *sample_shape]`.
            last: it is the last of its session, and may have fewer steps.
        """
        given = self._checked(arrays, last=last)
        if len(next(iter(given.values()))) == self.shape[0]:
            parts = [msgpack.Packer().pack_map_header(len(given))]
            for name, array in given.items():
                parts += [msgpack.packb(name), self.parts[name].encode(array)]
            return b"".join(parts)
        return encode(given)

    def data(self, arrays: Mapping[str, Array]) -> bytes:
        """As `encode`: there is no header that all frames begin with."""
        return self.encode(arrays)

    def datas(self, frames: Sequence[Mapping[str, Array]]) -> list[bytes | memoryview]:
        """The encodings of many frames."""
        return [self.encode(arrays) for arrays in frames]

    def _checked(self, arrays: Mapping[str, Array], *, last: bool) -> dict[str, Array]:
        if not isinstance(arrays, Mapping) or arrays.keys() != self.parts.keys():
            got = sorted(map(str, arrays)) if isinstance(arrays, Mapping) else type(arrays).__name__
            raise BadFrame("shape", f"a frame is a map of {self.name}; got {got}")
        found, steps = {}, set()
        for name, part in self.parts.items():
            array = np.asarray(arrays[name])
            short = last and part.is_short(array.shape)
            if array.shape != part.shape and not short:
                raise BadFrame(
                    "shape", f"input {name} is {list(part.shape)}, got {list(array.shape)}"
                )
            found[name] = part.cast(array)
            steps.add(array.shape[0])
        if len(steps) > 1:
            raise BadFrame("shape", f"the inputs of a frame have one number of steps, got {steps}")
        return found

    def many(self, raws: Sequence[bytes]) -> tuple[Array, NDArray[np.bool_]]:
        """Many encoded frames at once: `[n, frame, step]`, and which are encoded otherwise."""
        rows, frame = len(raws), self.shape[0]
        if sys.byteorder != "little" or set(map(len, raws)) != {self.size}:
            return np.zeros((rows, *self.shape), self.dtype), np.ones(rows, bool)
        block = np.frombuffer(b"".join(raws), np.uint8).reshape(rows, self.size)
        others = np.zeros(rows, bool)
        steps = []
        for (start, head), (at, nbytes), part in zip(
            self._heads, self._places, self.parts.values(), strict=True
        ):
            others |= (block[:, start : start + len(head)] != head).any(axis=1)
            data = block[:, at : at + nbytes]
            if part.dtype == np.bool_:
                others |= (data > 1).any(axis=1)
            steps.append(data.reshape(rows, frame, -1))
        return np.concatenate(steps, axis=2), others

    def finite(self, frames: Array) -> NDArray[np.bool_]:
        """Which of frames `[n, frame, step]` hold neither NaN nor an infinity."""
        found = np.ones(len(frames), bool)
        for name, array in self.unpack(frames).items():
            found &= self.parts[name].finite(array)
        return found

    def read(self, raw: bytes) -> tuple[bytes, int]:
        """The bytes of an encoded frame `[frame, step]`, checked, and its steps; padded.

        Raises:
            BadFrame: it is none.
        """
        arrays = decode(raw, max_bytes=self.max_bytes)
        if not isinstance(arrays, dict):
            raise BadFrame("shape", f"this app takes a map of {self.name}, got one array")
        for name, array in arrays.items():
            part = self.parts.get(name)
            if part is not None and array.dtype.newbyteorder("=") != part.dtype:
                raise BadFrame("dtype", f"input {name} is {part.name}, got {array.dtype.name}")
        given = self._checked(arrays, last=True)
        steps = len(next(iter(given.values())))
        return self.pack(given).tobytes().ljust(self.nbytes, b"\0"), steps

    def usual(self, payload: bytes) -> bytes:
        """The usual encoding of a frame, from its bytes `[frame, step]`."""
        return self.encode(self.unpack(np.frombuffer(payload, np.uint8).reshape(self.shape)))

    def payload(self, raw: bytes) -> bytes:
        """As `read`, whole frames only."""
        data, steps = self.read(raw)
        if steps != self.shape[0]:
            raise BadFrame("shape", f"a frame has {self.shape[0]} steps, got {steps}")
        return data

    def pack(self, arrays: Mapping[str, Array]) -> NDArray[np.uint8]:
        """Arrays `[..., frame, *sample_shape]` by name as bytes `[..., frame, step]`."""
        return pack(
            [(name, part.dtype, part.shape[1:]) for name, part in self.parts.items()], arrays
        )

    def unpack(self, frames: Array) -> dict[str, Array]:
        """Inverse of `pack`."""
        found, at = {}, 0
        for name, part in self.parts.items():
            step = part.nbytes // part.shape[0]
            data = np.ascontiguousarray(frames[..., at : at + step])
            shape = (*frames.shape[:-1], *part.shape[1:])
            found[name] = data.reshape(-1).view(part.dtype).reshape(shape)
            at += step
        return found

    def decode(self, raw: bytes) -> dict[str, Array]:
        """One frame's arrays by name; raises `BadFrame`."""
        payload = np.frombuffer(self.payload(raw), np.uint8)
        return self.unpack(payload.reshape(self.shape))


def pack(
    inputs: Iterable[tuple[str, np.dtype[Any], tuple[int, ...]]], arrays: Mapping[str, Any]
) -> NDArray[np.uint8]:
    """Arrays `[..., *sample_shape]` by name as bytes `[..., step]`, in the order of `inputs`.

    Args:
        inputs: name, dtype and sample shape of each.
        arrays: by name; of the same leading axes.
    """
    parts = []
    for name, dtype, shape in inputs:
        array = np.ascontiguousarray(arrays[name], dtype)
        leading = array.shape[: array.ndim - len(shape)]
        parts.append(
            array.reshape(-1).view(np.uint8).reshape(*leading, prod(shape) * dtype.itemsize)
        )
    return np.concatenate(parts, axis=-1)


AnyFrames = FrameCodec | NamedFrames


def frames_of(config: Mapping[str, str]) -> AnyFrames:
    """The codec of an app's frames, from its configuration."""
    frame, limit = int(config["frame"]), int(config.get("max_frame_bytes", MAX_FRAME_BYTES))
    if "inputs" in config:
        inputs = json.loads(config["inputs"])
        shapes = {name: (one["dtype"], tuple(one["shape"])) for name, one in inputs.items()}
        return NamedFrames(shapes, frame, max_bytes=limit)
    shape = (frame, *json.loads(config["sample_shape"]))
    return FrameCodec(config["dtype"], shape, max_bytes=limit)
