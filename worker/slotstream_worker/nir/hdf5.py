"""Reading a `.nir` file: HDF5 whose sizes, links and types are looked at before its bytes are.

Layout (`nir.write`, nir 1.0.8): a group `node` that holds a string `type` and the node's fields;
a `NIRGraph` has a group `nodes` of further nodes and a dataset `edges` `[n, 2]` of names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from slotstream_worker.nir.errors import BadGraph

MAX_BYTES = 2 * 2**30
"""Bytes of arrays that a file may declare, unless more are allowed."""

MAX_OBJECTS = 200_000
MAX_DEPTH = 64

Tree = dict[str, Any]
"""Groups as dictionaries; datasets as NumPy arrays, scalars as 0-d ones; strings as `str`."""


def read(path: Path, max_bytes: int = MAX_BYTES) -> Tree:
    """The file's `node` group.

    Nothing is read before what the whole file declares has been added up, so a file that
    declares ten gigabytes is refused without their allocation. Links to other files, virtual
    and external datasets are refused: a model is one file.

    Raises:
        BadGraph: the file cannot be read, says too much, or is not a NIR file.
    """
    try:
        if not path.is_file():
            raise BadGraph(f"there is no file {str(path)!r}, from {str(Path.cwd())!r}")
        file = h5py.File(path, "r")
    except OSError as error:
        raise BadGraph(
            f"{path} cannot be opened as HDF5, which a NIR file is: {error}. Was it copied whole, "
            "and written by nir.write?"
        ) from error
    with file:
        try:
            return _File(path, max_bytes).tree(file)
        except BadGraph:
            raise
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError) as error:
            # What h5py raises for damage that shows only on the way.
            raise BadGraph(
                f"{path} is damaged: HDF5 says {error}. Write it again with nir.write, or copy "
                "it again"
            ) from error


class _File:
    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.declared = 0
        self.objects = 0
        self.datasets: list[tuple[Tree, str, str, h5py.Dataset]] = []
        self.seen: set[int] = set()

    def tree(self, file: h5py.File) -> Tree:
        node = self._follow(file, "node", "") if "node" in file else None
        if not isinstance(node, h5py.Group):
            raise BadGraph(
                f"{self.path} is HDF5, but not a NIR file: it has no group 'node', it has "
                f"{sorted(file)[:8]}"
            )
        found = self._group(node, "", 0)
        for into, key, where, dataset in self.datasets:
            into[key] = self._value(dataset, where)
        return found

    def _group(self, group: h5py.Group, where: str, depth: int) -> Tree:
        address = h5py.h5o.get_info(group.id).addr
        if depth > MAX_DEPTH or address in self.seen:
            raise BadGraph(
                f"{self.path}: {where or 'the graph'} is nested without end or over "
                f"{MAX_DEPTH} deep"
            )
        self.seen.add(address)
        found: Tree = {}
        for key in group:
            if key == "metadata":  # NIR: no backend may rely on it
                continue
            inside = f"{where}/{key}".removeprefix("/")
            held = self._follow(group, key, inside)
            self.objects += 1
            if self.objects > MAX_OBJECTS:
                raise BadGraph(f"{self.path} holds over {MAX_OBJECTS} objects")
            if isinstance(held, h5py.Group):
                found[key] = self._group(held, inside, depth + 1)
            else:
                self._declare(held, inside)
                self.datasets.append((found, key, inside, held))
        return found

    def _follow(self, group: h5py.Group, key: str, where: str) -> Any:
        link = group.get(key, getlink=True)
        if not isinstance(link, h5py.HardLink):
            raise BadGraph(
                f"{self.path}: {_named(where or key)} is a link to another place or file; a NIR "
                "file holds its own data"
            )
        return group[key]

    def _declare(self, dataset: Any, where: str) -> None:
        if not isinstance(dataset, h5py.Dataset):
            raise BadGraph(f"{self.path}: {_named(where)} is neither a group nor a dataset")
        if dataset.is_virtual or dataset.external:
            raise BadGraph(f"{self.path}: {_named(where)} keeps its data in another file")
        if h5py.check_string_dtype(dataset.dtype) is None and dataset.dtype.kind not in "iufb":
            raise BadGraph(
                f"{self.path}: {_named(where)} is of type {dataset.dtype}; a field is of real "
                "numbers, whole numbers or text"
            )
        size = (dataset.size or 0) * dataset.dtype.itemsize
        self.declared += size
        if self.declared > self.max_bytes:
            raise BadGraph(
                f"{self.path}: {_named(where)} declares shape {list(dataset.shape)} of "
                f"{dataset.dtype}, {size:,} bytes, and with it the file {self.declared:,}, over "
                f"the limit of {self.max_bytes:,}; nothing was read. Allow more with "
                "--max-model-bytes (max_bytes) if that is its size"
            )

    def _value(self, dataset: h5py.Dataset, where: str) -> Any:
        if dataset.shape is None:
            raise BadGraph(f"{self.path}: {_named(where)} is empty")
        try:
            if h5py.check_string_dtype(dataset.dtype) is not None:
                return dataset.asstr()[()]
            return np.asarray(dataset[()])
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            raise BadGraph(
                f"{self.path}: {_named(where)} cannot be read: {error}. The file is damaged; "
                "write or copy it again"
            ) from error


def _named(where: str) -> str:
    """`nodes/fc1/weight` as `node 'fc1', field 'weight'`; nested names are joined with /."""
    parts = where.split("/")
    names = []
    while len(parts) >= 2 and parts[0] == "nodes":
        names.append(parts[1])
        parts = parts[2:]
    called = [f"node {'/'.join(names)!r}"] if names else []
    return ", ".join(called + ([f"field {'/'.join(parts)!r}"] if parts else []))


def from_mapping(given: Mapping[str, Any]) -> Tree:
    """The tree of `nir.NIRGraph.to_dict()`, as `read` gives that of a file."""
    found: Tree = {}
    for key, value in given.items():
        if key == "metadata" or value is None:
            continue
        if isinstance(value, Mapping):
            found[key] = from_mapping(value)
        elif isinstance(value, str):
            found[key] = value
        else:
            found[key] = np.asarray(value)
    return found
