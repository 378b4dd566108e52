"""Arrays as bytes and back: the one place where values cross the wire.

A frame or an output is a msgpack map `{"dtype": name, "shape": [...], "data": bytes}`, the data
little-endian in C order. Nothing is ever unpickled, lengths are checked before anything is
allocated, and what a producer sent is only ever read.

    frames = FrameCodec("float32", (10, 40))
    raw = frames.encode(array)
    array = frames.decode(raw)            # raises BadFrame, whose `code` goes into the reply
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import prod

import msgpack
import numpy as np
from numpy.typing import NDArray

from slotstream.errors import BadFrame
from slotstream.layouts import Layout, Layouts, Part

Array = NDArray[np.generic]

# Wire names of dtypes. NumPy's own string forms are not used: `dtype.str` of bfloat16 is `<V2`.
_NUMPY = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_ML = (
    *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
DTYPES = (*_NUMPY, *_ML)
MAX_RANK = 16
MAX_FRAME_BYTES = 64 * 2**20
_FIELDS = {"dtype", "shape", "data"}
_FEW = 4
"""Frames that are read one by one rather than all at once."""
_SMALL_BYTES = 4096
_layouts = Layouts()


def dtype_of(name: str) -> np.dtype[np.generic]:
    """NumPy dtype of a wire name; raises `BadFrame` (code `dtype`) for any other name."""
    if name in _NUMPY:
        return np.dtype(name)
    if name in _ML:
        try:
            import ml_dtypes
        except ImportError:
            raise BadFrame(
                "dtype", f"dtype {name} needs the package ml_dtypes; pip install ml_dtypes"
            ) from None
        found: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
        return found
    hint = ""
    if name[:1] in "<>=|":
        hint = "; data is always little-endian, and the name has no byte-order mark"
    raise BadFrame(
        "dtype", f"dtype {name[:40]!r} is not one of {', '.join(_NUMPY)}, bfloat16, float8_*{hint}"
    )


def name_of(dtype: np.dtype[np.generic]) -> str:
    """Wire name of a NumPy dtype; raises `BadFrame` for one the wire has no name for."""
    name = np.dtype(dtype).name
    if name not in DTYPES:
        raise BadFrame(
            "dtype",
            f"arrays of dtype {dtype} cannot be sent; the wire knows "
            f"{', '.join(_NUMPY)}, bfloat16, float8_*",
        )
    return name


def _data(array: Array) -> bytes:
    """An array's bytes, little-endian in C order, whatever its own layout."""
    if array.dtype.byteorder == ">" or (sys.byteorder == "big" and array.dtype.byteorder == "="):
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.tobytes(order="C")


def encode(array: Array | Mapping[str, Array]) -> bytes:
    """Encode one array, or a mapping of names to arrays (a model with several outputs)."""
    if isinstance(array, Mapping):
        parts = [_map_header(len(array))]
        for name, value in array.items():
            parts += [msgpack.packb(name), encode(value)]
        return b"".join(parts)
    array = np.asarray(array)
    name = name_of(array.dtype.newbyteorder("="))
    raw: bytes = msgpack.packb({"dtype": name, "shape": list(array.shape), "data": _data(array)})
    return raw


def _map_header(size: int) -> bytes:
    header: bytes = msgpack.Packer().pack_map_header(size)
    return header


def header(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bytes:
    """All bytes of a frame's encoding that stand before its data: the same for every frame."""
    nbytes = prod(shape) * np.dtype(dtype).itemsize
    prefix = msgpack.packb({"dtype": name_of(dtype), "shape": list(shape), "data": b""})
    # The empty data is two bytes, bin8 and a length of 0; its header depends on the real length.
    return bytes(prefix[:-2]) + _bin_header(nbytes)


def _bin_header(nbytes: int) -> bytes:
    if nbytes < 2**8:
        return b"\xc4" + nbytes.to_bytes(1, "big")
    if nbytes < 2**16:
        return b"\xc5" + nbytes.to_bytes(2, "big")
    return b"\xc6" + nbytes.to_bytes(4, "big")


def _unpack(raw: bytes, max_bytes: int) -> object:
    """Parse msgpack under limits; raises `BadFrame` with what is wrong."""
    if len(raw) > max_bytes:
        raise BadFrame("too_large", f"a frame is at most {max_bytes} bytes, got {len(raw)}")
    if not raw:
        raise BadFrame(
            "not_msgpack", "the frame is empty; it is a msgpack map of dtype, shape, data"
        )
    try:
        return msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_once,
            use_list=True,
            max_str_len=256,
            max_bin_len=max_bytes,
            max_array_len=1024,
            max_map_len=1024,
            max_ext_len=0,
        )
    except BadFrame:
        raise
    except msgpack.ExtraData:
        raise BadFrame("not_msgpack", "the frame holds more than one msgpack value") from None
    # Malformed bytes surface as any of these, by where they break off.
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError) as error:
        detail = str(error) or type(error).__name__
        raise BadFrame(
            "not_msgpack",
            f"the frame is not valid msgpack ({detail}); it is a map of dtype, shape, data (bytes)",
        ) from None


def _once(pairs: list[tuple[object, object]]) -> dict[object, object]:
    """A parsed map; two readers could take different ones of a key's two values."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key in found if [k for k, _ in pairs].count(key) > 1)
        raise BadFrame("unknown_field", f"a map has each key once, this one has {twice!r} twice")
    return found


def _array(value: object) -> Array:
    """One array from its parsed map; raises `BadFrame`."""
    if not isinstance(value, dict):
        raise BadFrame(
            "not_a_map",
            f"a frame is a msgpack map of dtype, shape and data, got {type(value).__name__}",
        )
    if missing := _FIELDS - value.keys():
        raise BadFrame(
            "missing_field",
            f"the frame's map lacks {', '.join(sorted(missing))}; it has dtype, shape and data",
        )
    if extra := value.keys() - _FIELDS:
        raise BadFrame(
            "unknown_field",
            "the frame's map has dtype, shape and data, and this one "
            f"also {', '.join(sorted(map(repr, extra)))[:80]}",
        )
    name, shape, data = value["dtype"], value["shape"], value["data"]
    if not isinstance(name, str):
        raise BadFrame("dtype", f"dtype is a name such as 'float32', got {type(name).__name__}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise BadFrame("shape", "shape is a list of whole numbers, 0 or more")
    if len(shape) > MAX_RANK:
        raise BadFrame("shape", f"shape has at most {MAX_RANK} axes, got {len(shape)}")
    if not isinstance(data, bytes):
        raise BadFrame("data", f"data is msgpack bin (bytes), got {type(data).__name__}")
    dtype = dtype_of(name)
    expected = prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise BadFrame(
            "byte_count", f"{name}{shape} takes {expected} bytes of data, got {len(data)}"
        )
    if dtype == np.bool_ and data.translate(None, b"\x00\x01"):
        # NumPy would show it as True; what a device makes of it is anyone's guess.
        raise BadFrame("data", "the bytes of a bool are 0 or 1")
    if sys.byteorder == "big" and dtype.kind in "iufc":
        dtype = dtype.newbyteorder("<")
    try:
        return np.frombuffer(data, dtype).reshape(shape)
    except ValueError:  # an axis of 0 hides others that are out of bounds
        raise BadFrame("shape", "shape has an axis of 0, and its others are too long") from None


def decode(raw: bytes, *, max_bytes: int = MAX_FRAME_BYTES) -> Array | dict[str, Array]:
    """Decode one array or a map of names to arrays. The arrays are read-only views of `raw`'s copy.

    Raises:
        BadFrame: `raw` is not an encoding of either; `code` names the kind.
    """
    if len(raw) <= max_bytes and (known := _layouts.read(raw)) is not None:
        return known
    value = _unpack(raw, max_bytes)
    found: Array | dict[str, Array]
    if isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values()):
        found = {str(name): _array(part) for name, part in value.items()}
    else:
        found = _array(value)
    if _layouts.wants(len(raw)):
        _layouts.keep(len(raw), _layout(raw, found))
    return found


def _layout(raw: bytes, found: Array | dict[str, Array]) -> Layout | None:
    """The layout of an encoding, where all others of it can be read without a look at their data.

    Not of a bool (its bytes are checked), nor of one that `encode` would have written otherwise.
    """
    named = isinstance(found, dict)
    arrays = found if isinstance(found, dict) else {"": found}
    plain = all(a.dtype != np.bool_ and a.nbytes for a in arrays.values())
    if not plain or sys.byteorder == "big" or encode(found) != raw:
        return None
    parts, before = [], _map_header(len(arrays)) if named else b""
    for name, array in arrays.items():
        head = before + (msgpack.packb(name) if named else b"") + header(array.dtype, array.shape)
        parts.append(Part(name, head, array.dtype, array.shape))
        before = b""
    return Layout(parts, named=named)


class FrameCodec:
    """Frames of one fixed dtype and shape, `[frame, *sample_shape]`.

    The encoding of a fixed shape differs only in its data, so the usual frame is recognised by
    its first bytes and never parsed; any other valid encoding is accepted too.
    """

    def __init__(
        self, dtype: str, shape: tuple[int, ...], *, max_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        self.dtype, self.shape, self.max_bytes = dtype_of(dtype), tuple(shape), max_bytes
        self.name = dtype
        self.nbytes = prod(self.shape) * self.dtype.itemsize
        self.header = header(self.dtype, self.shape)
        self.size = len(self.header) + self.nbytes
        """Bytes of an encoded frame."""
        self._head = np.frombuffer(self.header, np.uint8)
        self._plain = self.dtype != np.bool_  # any bytes of the right number are values
        if self.size > max_bytes:
            raise BadFrame(
                "too_large",
                f"one frame {dtype}{list(shape)} takes {self.size} bytes, "
                f"more than the limit of {max_bytes}",
            )

    @property
    def described(self) -> str:
        """Dtype and shape, for a message."""
        return f"{self.name} {list(self.shape)}"

    def encode(self, array: Array, *, last: bool = False) -> bytes:
        """Encode one frame; raises `BadFrame` where it is not of this dtype and shape.

        Args:
            array: `[frame, *sample_shape]`.
            last: it is the last of its session, and may have fewer steps.
        """
        if last and self.is_short(np.shape(array)):
            return encode(self.cast(np.asarray(array)))
        return self.header + self.data(array)

    def is_short(self, shape: tuple[int, ...]) -> bool:
        """Whether it is a frame of fewer steps, at least one."""
        return shape[1:] == self.shape[1:] and 0 < shape[0] < self.shape[0] if shape else False

    def cast(self, array: Array) -> Array:
        """An array of another dtype of the same kind; raises `BadFrame`."""
        try:
            cast: Array = array.astype(self.dtype, casting="same_kind", copy=False)
        except TypeError:
            raise BadFrame("dtype", f"a frame is {self.name}, got {array.dtype.name}") from None
        return cast

    def data(self, array: Array) -> bytes:
        """A copy of a frame's data, without the `header`; raises `BadFrame` as `encode` does."""
        if type(array) is np.ndarray and array.dtype is self.dtype and array.shape == self.shape:
            return array.tobytes()  # the usual frame; nothing of it has to be converted
        array = np.asarray(array)
        if array.shape != self.shape:
            raise BadFrame("shape", f"a frame is {list(self.shape)}, got {list(array.shape)}")
        return _data(self.cast(array))

    def datas(self, frames: Array) -> list[bytes | memoryview]:
        """The data of each of many frames `[n, *shape]`; of large ones as views of the array.

        Raises:
            BadFrame: as `encode` does.
        """
        if frames.shape[1:] != self.shape:
            raise BadFrame("shape", f"a frame is {list(self.shape)}, got {list(frames.shape[1:])}")
        try:
            cast = frames.astype(self.dtype, order="C", casting="same_kind", copy=False)
        except TypeError:
            raise BadFrame("dtype", f"a frame is {self.name}, got {frames.dtype.name}") from None
        whole: bytes | memoryview
        # A small copy is made sooner than a view, which the garbage collector would follow too.
        if self.nbytes <= _SMALL_BYTES or sys.byteorder == "big":
            whole = _data(cast)
        else:  # as bytes first: the buffer protocol has no word for bfloat16
            whole = cast.reshape(-1).view(np.uint8).data
        return [whole[k * self.nbytes : (k + 1) * self.nbytes] for k in range(len(cast))]

    def many(self, raws: Sequence[bytes]) -> tuple[Array, NDArray[np.bool_]]:
        """Many encoded frames at once: frames `[n, frame, *sample_shape]`, and which are not so.

        The usual encoding differs from frame to frame only in its data, so the first bytes of all
        of them are compared at once, and no frame is parsed. The frame of one that is encoded
        otherwise, or is none, is undefined: `read` says what it is.
        """
        rows = len(raws)
        if 0 < rows <= _FEW and self._plain and sys.byteorder == "little":
            return self._few(raws)
        if sys.byteorder != "little" or set(map(len, raws)) != {self.size}:
            return np.zeros((rows, *self.shape), self.dtype), np.ones(rows, bool)
        block = np.frombuffer(b"".join(raws), np.uint8).reshape(rows, self.size)
        start = len(self.header)
        others: NDArray[np.bool_] = (block[:, :start] != self._head).any(axis=1)
        data = np.ascontiguousarray(block[:, start:])
        if not self._plain:
            others |= (data > 1).any(axis=1)
        return data.view(self.dtype).reshape(rows, *self.shape), others

    def _few(self, raws: Sequence[bytes]) -> tuple[Array, NDArray[np.bool_]]:
        """`many`, in fewer steps than are worth taking for all at once."""
        size, head, start = self.size, self.header, len(self.header)
        usual = [len(raw) == size and raw.startswith(head) for raw in raws]
        datas = [
            raw[start:] if one else bytes(self.nbytes) for raw, one in zip(raws, usual, strict=True)
        ]
        frames = np.frombuffer(b"".join(datas), self.dtype).reshape(len(raws), *self.shape)
        return frames, ~np.array(usual, bool)

    def finite(self, frames: Array) -> NDArray[np.bool_]:
        """Which of frames `[n, frame, *sample_shape]` hold neither NaN nor an infinity."""
        if not np.issubdtype(self.dtype, np.inexact):
            return np.ones(len(frames), bool)
        finite = np.isfinite(np.asarray(frames)).reshape(len(frames), -1)
        return np.asarray(finite.all(axis=1))

    def read(self, raw: bytes) -> tuple[bytes, int]:
        """The data bytes of an encoded frame, checked, and its steps; a short one is padded.

        Raises:
            BadFrame: it is no frame of this dtype and shape, nor one of fewer steps.
        """
        if self._plain and len(raw) == self.size and raw.startswith(self.header):
            return raw[len(self.header) :], self.shape[0]
        array = _array(_unpack(raw, self.max_bytes))
        if array.dtype.newbyteorder("=") == self.dtype and self.is_short(array.shape):
            return array.tobytes().ljust(self.nbytes, b"\0"), array.shape[0]
        return self.payload(raw), self.shape[0]

    def usual(self, payload: bytes) -> bytes:
        """The usual encoding of a frame, from its data bytes."""
        return self.header + payload

    def payload(self, raw: bytes) -> bytes:
        """The data bytes of an encoded frame, checked; raises `BadFrame`."""
        if self._plain and len(raw) == self.size and raw.startswith(self.header):
            return raw[len(self.header) :]
        array = _array(_unpack(raw, self.max_bytes))
        if array.dtype.newbyteorder("=") != self.dtype:
            raise BadFrame("dtype", f"this app takes frames of {self.name}, got {array.dtype.name}")
        if array.shape != self.shape:
            raise BadFrame(
                "shape",
                f"this app takes frames of {list(self.shape)} ([frame, "
                f"*sample_shape]), got {list(array.shape)}",
            )
        return array.tobytes()

    def decode(self, raw: bytes) -> Array:
        """One frame as a read-only array; raises `BadFrame`."""
        dtype = self.dtype if sys.byteorder == "little" else self.dtype.newbyteorder("<")
        return np.frombuffer(self.payload(raw), dtype).reshape(self.shape)
