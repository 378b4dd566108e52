"""Files that weights come in: safetensors (one, or several with an index), Orbax, Flax msgpack.

    found = read_weights(Path("model.safetensors"))
    found.arrays["params/Dense_0/kernel"]           # mapped from the file, not read yet
    found.places["params/Dense_0/kernel"]           # (file, offset), where it lies as it is

Nothing here needs a device.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slotstream.codec import dtype_of
from slotstream_worker.weights.errors import BadWeights
from slotstream_worker.weights.names import flatten

FORMATS = ("safetensors", "orbax", "msgpack")
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}  # fmt: skip
_LONGEST_HEADER = 100 * 2**20


@dataclass(frozen=True)
class Found:
    """Tensors by name; `places`: file and offset of those that lie in a file as they are."""

    kind: str
    arrays: Mapping[str, np.ndarray[Any, Any]]
    places: Mapping[str, tuple[Path, int]] = field(default_factory=dict)


def read_weights(path: Path) -> Found:
    """Read a file or folder, whichever of the formats it is.

    Raises:
        BadWeights: it is none of them, or broken; says what was expected.
    """
    if not path.exists():
        raise BadWeights(f"there is no {path}")
    if path.is_dir():
        return _read_folder(path)
    if path.name.endswith(".index.json"):
        return _read_index(path)
    if path.suffix == ".safetensors":
        arrays, places = _read_safetensors(path)
        return Found("safetensors", arrays, places)
    return _read_msgpack(path)


def _read_folder(path: Path) -> Found:
    indices = sorted(path.glob("*.index.json"))
    if len(indices) == 1:
        return _read_index(indices[0])
    single = sorted(path.glob("*.safetensors"))
    if len(single) == 1 and not indices:
        return read_weights(single[0])
    if single or indices:
        raise BadWeights(
            f"{path} holds {len(single)} safetensors files and {len(indices)} indices; sharded "
            "safetensors have one *.index.json that says which tensor is where"
        )
    return _read_orbax(path)


def _read_safetensors(
    path: Path,
) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, tuple[Path, int]]]:
    """The header, by the format's own description: 8 bytes of length, JSON, then the data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        (length,) = struct.unpack("<Q", head) if len(head) == 8 else (2**64 - 1,)
        if length > min(size - 8, _LONGEST_HEADER):
            raise BadWeights(f"{path} is no safetensors file: its header is longer than the file")
        try:
            header = json.loads(file.read(length))
            entries = {k: v for k, v in header.items() if k != "__metadata__"}
            parsed = [
                (
                    name,
                    DTYPES[e["dtype"]],
                    tuple(map(int, e["shape"])),
                    *map(int, e["data_offsets"]),
                )
                for name, e in entries.items()
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadWeights(
                f"{path} is no safetensors file that can be read: {type(error).__name__}: {error}"
            ) from error
    data = np.memmap(path, np.uint8, mode="r") if size else np.zeros(0, np.uint8)
    arrays, places = {}, {}
    for name, dtype_name, shape, start, end in parsed:
        dtype = dtype_of(dtype_name)
        first = 8 + length + start
        expected = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if end - start != expected or not 0 <= start <= end <= size - 8 - length:
            raise BadWeights(
                f"{path}: {name} is {dtype_name}{list(shape)}, {expected:,} bytes, and its range "
                f"is {start}:{end} of {size - 8 - length:,}; is the file cut off?"
            )
        raw: np.ndarray[Any, Any] = np.asarray(data[first : first + expected])
        if raw.ctypes.data % max(dtype.itemsize, 1):
            raw = raw.copy()
        arrays[name] = raw.view(dtype).reshape(shape)
        places[name] = (path.resolve(), first)
    return arrays, places


def _read_index(path: Path) -> Found:
    try:
        index = json.loads(path.read_text())["weight_map"]
        files = sorted(set(index.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadWeights(
            f"{path} is no index of sharded safetensors (a weight_map of tensor to file): {error!r}"
        ) from error
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    places: dict[str, tuple[Path, int]] = {}
    for file in files:
        part = path.parent / file
        if not part.exists():
            raise BadWeights(f"{path} names {file}, which is not beside it")
        held, at = _read_safetensors(part)
        for name in (n for n, f in index.items() if f == file):
            if name not in held:
                raise BadWeights(f"{path} says that {name} is in {file}, which does not hold it")
            arrays[name], places[name] = held[name], at[name]
    return Found("safetensors", arrays, places)


def _read_msgpack(path: Path) -> Found:
    from flax import serialization

    try:
        tree = serialization.msgpack_restore(path.read_bytes())
        return Found("msgpack", _arrays(tree, path))
    except BadWeights:
        raise
    except Exception as error:  # whatever a parser makes of arbitrary bytes
        raise BadWeights(
            f"{path} is neither a .safetensors file, nor an index of them, nor Flax msgpack "
            f"({type(error).__name__}: {error})"
        ) from error


def _read_orbax(path: Path) -> Found:
    import orbax.checkpoint as ocp

    folder = path.resolve()
    # A checkpoint manager's step keeps the tree in an item of its own.
    for item in ("default", "params", "state", "model"):
        if not (folder / "_METADATA").exists() and (folder / item / "_METADATA").exists():
            folder = folder / item
            break
    try:
        with ocp.PyTreeCheckpointer() as reader:
            metadata = reader.metadata(folder)
            tree = getattr(metadata, "item_metadata", metadata)
            tree = getattr(tree, "tree", tree)
            import jax

            as_numpy = jax.tree.map(lambda _leaf: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            return Found("orbax", _arrays(reader.restore(folder, restore_args=as_numpy), path))
    except BadWeights:
        raise
    except Exception as error:  # whatever a parser makes of an arbitrary folder
        raise BadWeights(
            f"{path} holds neither safetensors nor an Orbax checkpoint "
            f"({type(error).__name__}: {error})"
        ) from error


def _arrays(tree: Any, path: Path) -> dict[str, np.ndarray[Any, Any]]:
    arrays = {}
    for name, leaf in flatten(tree).items():
        array = np.asarray(leaf)
        if array.dtype == object:
            raise BadWeights(f"{path}: {name} is a {type(leaf).__name__}, and no array")
        arrays[name] = array
    if not arrays:
        raise BadWeights(f"{path} holds no arrays")
    return arrays
