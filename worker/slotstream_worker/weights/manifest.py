"""The manifest of a version: every tensor, the shards that make it up, where each lies, its digest.

It is immutable. Each rank of a trainer makes a part of one; `assemble` puts the parts together and
checks that they hold every element of every tensor exactly once, by arithmetic over the boxes,
before a byte is moved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from slotstream.codec import dtype_of
from slotstream.errors import BadFrame
from slotstream_worker.weights.boxes import Box, flaw
from slotstream_worker.weights.errors import BadWeights

FORMAT = 1
POLICIES = ("keep", "reset", "pin")


@dataclass(frozen=True)
class Source:
    """Where a shard's bytes lie: `kind` names the transport, `where` is for it to read."""

    kind: str
    where: Mapping[str, Any]


@dataclass(frozen=True)
class Shard:
    """A part of a tensor: its bytes are little-endian, in C order of the box."""

    box: Box
    digest: str
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Tensor:
    """One tensor: its global shape and dtype (as on the wire), and its shards."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]

    @property
    def numpy(self) -> np.dtype[Any]:
        """Its dtype."""
        return dtype_of(self.dtype)

    def nbytes(self, box: Box | None = None) -> int:
        """Bytes of all of it, or of a part."""
        return (prod(self.shape) if box is None else box.volume) * self.numpy.itemsize


@dataclass(frozen=True)
class Options:
    """How a version is applied.

    `on_weights`: what becomes of the sessions' states, `keep`, `reset` or `pin`. `at_once`: no
    worker applies it before all have verified it. `cast`: dtypes may be changed with a loss.
    `extra`: tensors that the model has no leaf for are passed over. `canary`: recorded frames are
    stored beside it.
    """

    on_weights: str = "keep"
    at_once: bool = False
    cast: bool = False
    extra: bool = False
    canary: bool = False

    def __post_init__(self) -> None:
        if self.on_weights not in POLICIES:
            raise BadWeights(f"on_weights is one of {', '.join(POLICIES)}, got {self.on_weights!r}")


@dataclass(frozen=True)
class Manifest:
    """A version: its name, its tensors by name, and how it is applied."""

    version: str
    tensors: tuple[Tensor, ...]
    options: Options = field(default_factory=Options)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes() for tensor in self.tensors)

    @cached_property
    def fingerprint(self) -> str:
        """Of its physical layout: names, shapes, dtypes, shards; neither digests nor places."""
        lines = [
            f"{t.name} {t.dtype} {t.shape} {' '.join(str(s.box) for s in t.shards)}"
            for t in self.tensors
        ]
        return _sha256("\n".join(lines))

    @cached_property
    def content(self) -> str:
        """Of its values: names, shapes, dtypes, and the digest of every shard."""
        lines = [
            f"{t.name} {t.dtype} {t.shape} {' '.join(f'{s.box} {s.digest}' for s in t.shards)}"
            for t in self.tensors
        ]
        return _sha256("\n".join(lines))

    def flaws(self) -> list[str]:
        """What is wrong with the tensors' shards, a line each; none where every element is held."""
        return [
            f"{tensor.name}: {found}"
            for tensor in self.tensors
            if (found := flaw(tensor.shape, [shard.box for shard in tensor.shards]))
        ]

    def encode(self) -> str:
        """As JSON, the same for the same manifest."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": self.version,
                "options": self.options.__dict__,
                "tensors": [_tensor_fields(tensor) for tensor in self.tensors],
            },
            sort_keys=True,
            separators=(",", ":"),
        )

    @classmethod
    def decode(cls, raw: str | bytes) -> Manifest:
        """Read a manifest; raises `BadWeights` where it is none, with what is wrong."""
        try:
            value = json.loads(raw)
            if value["format"] != FORMAT:
                raise BadWeights(
                    f"the manifest has format {value['format']}, and this release reads {FORMAT}"
                )
            return cls(
                str(value["version"]),
                tuple(_tensor(fields) for fields in value["tensors"]),
                Options(**value["options"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, BadFrame) as error:
            raise BadWeights(
                f"this is no manifest of a version: {type(error).__name__}: {error}"
            ) from error


def assemble(version: str, parts: Iterable[Sequence[Tensor]], options: Options) -> Manifest:
    """One manifest of the ranks' parts.

    The same shard from several ranks (a replicated tensor) is one shard with several sources.

    Raises:
        BadWeights: the parts contradict one another, or leave out or repeat an element.
    """
    tensors: dict[str, Tensor] = {}
    shards: dict[str, dict[Box, Shard]] = {}
    for part in parts:
        for tensor in part:
            known = tensors.setdefault(tensor.name, tensor)
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise BadWeights(
                    f"{tensor.name} is {known.dtype}{list(known.shape)} for one rank and "
                    f"{tensor.dtype}{list(tensor.shape)} for another; all ranks give the global "
                    "shape and dtype"
                )
            for shard in tensor.shards:
                held = shards.setdefault(tensor.name, {}).get(shard.box)
                if held is None:
                    shards[tensor.name][shard.box] = shard
                elif held.digest != shard.digest:
                    raise BadWeights(
                        f"{tensor.name}{shard.box}: two ranks publish different values of it; "
                        "replicas are equal, bit for bit"
                    )
                else:
                    shards[tensor.name][shard.box] = replace(
                        held, sources=(*held.sources, *shard.sources)
                    )
    whole = tuple(
        replace(tensors[name], shards=tuple(
            sorted(shards.get(name, {}).values(), key=lambda s: (s.box.offset, s.box.extent))))
        for name in sorted(tensors)
    )  # fmt: skip
    manifest = Manifest(version, whole, options)
    if not whole:
        raise BadWeights(f"version {version} holds no tensor")
    if flaws := manifest.flaws():
        raise BadWeights(f"version {version} is not whole: " + "; ".join(flaws[:5]))
    return manifest


def encode_part(tensors: Sequence[Tensor]) -> str:
    """One rank's part, as JSON."""
    return json.dumps([_tensor_fields(tensor) for tensor in tensors], sort_keys=True)


def decode_part(raw: str | bytes) -> tuple[Tensor, ...]:
    """Read one rank's part; raises `BadWeights`."""
    try:
        return tuple(_tensor(fields) for fields in json.loads(raw))
    except (ValueError, KeyError, TypeError, AttributeError, BadFrame) as error:
        raise BadWeights(
            f"this is no part of a manifest: {type(error).__name__}: {error}"
        ) from error


def _tensor_fields(tensor: Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "shards": [
            {
                "offset": list(shard.box.offset),
                "extent": list(shard.box.extent),
                "digest": shard.digest,
                "sources": [{"kind": s.kind, **s.where} for s in shard.sources],
            }
            for shard in tensor.shards
        ],
    }


def _tensor(fields: Mapping[str, Any]) -> Tensor:
    dtype_of(fields["dtype"])
    shards = []
    for shard in fields["shards"]:
        sources = tuple(
            Source(str(s["kind"]), {k: v for k, v in s.items() if k != "kind"})
            for s in shard["sources"]
        )
        box = Box(tuple(map(int, shard["offset"])), tuple(map(int, shard["extent"])))
        shards.append(Shard(box, str(shard["digest"]), sources))
    return Tensor(
        str(fields["name"]), fields["dtype"], tuple(map(int, fields["shape"])), tuple(shards)
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
