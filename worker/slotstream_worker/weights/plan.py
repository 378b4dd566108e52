"""The plan of a transfer: which shards are needed, and where each of their parts goes.

Published shards are mapped onto the engine's leaves by intersecting boxes. A plan depends on shapes
alone, so it is kept by the fingerprints of both sides: *hit* for the same version once more,
*refresh* where only digests and places differ, *miss* where it is made anew.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from slotstream_worker.weights.boxes import Box
from slotstream_worker.weights.errors import BadWeights, Refused
from slotstream_worker.weights.layout import Layout, Leaf
from slotstream_worker.weights.manifest import Manifest, Tensor
from slotstream_worker.weights.names import match

KEPT = 4
"""Plans kept; a trainer publishes in one layout, or in a few by turns."""

Explain = Callable[[Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]], str]


@dataclass(frozen=True)
class Copy:
    """Elements of a shard that go to a box of a leaf: where they are in each."""

    leaf: str
    box: Box
    source: tuple[slice, ...]
    target: tuple[slice, ...]


@dataclass(frozen=True)
class Step:
    """One shard to be moved: which, how many bytes, and where its parts go.

    `direct`: its bytes are a run of one buffer's memory, and are received there.
    """

    tensor: int
    shard: int
    nbytes: int
    copies: tuple[Copy, ...]
    direct: bool


@dataclass(frozen=True)
class Plan:
    """Everything that is to be moved. `leaf_of`: the leaf of each tensor that has one."""

    steps: tuple[Step, ...]
    nbytes: int
    largest: int
    leaf_of: Mapping[str, str]


class Planner:
    """Makes plans for one engine layout, and keeps them."""

    def __init__(self, layout: Layout, explain: Explain = lambda _shapes: "") -> None:
        self.layout, self._explain = layout, explain
        self.counts: Counter[str] = Counter()
        self._kept: OrderedDict[tuple[str, str, bool, bool], tuple[str, Plan]] = OrderedDict()

    def plan(self, manifest: Manifest) -> tuple[Plan, str]:
        """A plan for a version, and whether it was a `hit`, a `refresh` or a `miss`.

        Raises:
            Refused: the version does not cover the model, or does not fit it.
        """
        options = manifest.options
        key = (manifest.fingerprint, self.layout.fingerprint, options.cast, options.extra)
        held = self._kept.get(key)
        if held is None:
            outcome, plan = "miss", build(manifest, self.layout, self._explain)
        else:
            outcome = "hit" if held[0] == manifest.content else "refresh"
            plan = held[1]
        self._kept[key] = (manifest.content, plan)
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        self.counts[outcome] += 1
        return plan, outcome


def build(manifest: Manifest, layout: Layout, explain: Explain = lambda _shapes: "") -> Plan:
    """Prove that a version covers the model, and say what is to be moved; moves nothing.

    Raises:
        Refused: with all that is wrong.
    """
    if flaws := manifest.flaws():
        raise Refused("planned", _list("it is not whole", flaws))
    leaves = {leaf.name: leaf for leaf in layout.leaves}
    try:
        found, over = match(list(leaves), [tensor.name for tensor in manifest.tensors])
    except BadWeights as error:
        raise Refused("planned", str(error)) from error
    missing = sorted(set(leaves) - set(found))
    if missing:
        raise Refused(
            "planned", _list("it has no tensor for these of the model's leaves", missing)
            + (f" (it has {', '.join(over[:5])} instead)" if over else ""),
        )  # fmt: skip
    if over and not manifest.options.extra:
        raise Refused(
            "planned",
            _list("the model has no leaf for these of its tensors", sorted(over))
            + "; publish the model's own weights only, or say --extra to pass them over",
        )
    index = {tensor.name: k for k, tensor in enumerate(manifest.tensors)}
    _check_fit(manifest, leaves, {leaf: index[name] for leaf, name in found.items()}, explain)
    steps = [
        step
        for leaf, name in sorted(found.items())
        for step in _steps(manifest.tensors[index[name]], index[name], leaves[leaf])
    ]
    return Plan(
        tuple(steps),
        sum(step.nbytes for step in steps),
        max((step.nbytes for step in steps if not step.direct), default=0),
        {name: leaf for leaf, name in found.items()},
    )


def _check_fit(
    manifest: Manifest, leaves: Mapping[str, Leaf], found: Mapping[str, int], explain: Explain
) -> None:
    shapes, dtypes, given = [], [], {}
    for name, k in found.items():
        leaf, tensor = leaves[name], manifest.tensors[k]
        given[name] = (tensor.shape, leaf.dtype)
        if tensor.shape != leaf.shape:
            shapes.append(f"{name} is {list(tensor.shape)} and the model's {list(leaf.shape)}")
        if not _castable(tensor.numpy, leaf.dtype, lossy=manifest.options.cast):
            dtypes.append(f"{name} is {tensor.dtype} and the model's {leaf.dtype.name}")
    if shapes:
        state = explain(given)
        raise Refused(
            "planned",
            _list("its shapes are not the model's", sorted(shapes))
            + (f". Of the sessions' states, {state}" if state else "")
            + "; a model of another shape is another app",
        )
    if dtypes:
        raise Refused(
            "planned",
            _list("its dtypes cannot be changed without a loss", sorted(dtypes))
            + "; publish the model's own dtypes, or say --cast where a loss is meant",
        )


def _castable(source: np.dtype[Any], target: np.dtype[Any], *, lossy: bool) -> bool:
    """Whether values may change from one dtype to the other; with a loss only within a kind."""
    if source == target or bool(np.can_cast(source, target, "safe")):
        return True
    return lossy and _kind(source) == _kind(target)


def _kind(dtype: np.dtype[Any]) -> str:
    # bfloat16 and float8 are of NumPy's kind "V".
    kinds = {"V": "f", "u": "i"}
    return kinds.get(dtype.kind, str(dtype.kind))


def _steps(tensor: Tensor, number: int, leaf: Leaf) -> list[Step]:
    steps = []
    for k, shard in enumerate(tensor.shards):
        copies = []
        for box in leaf.boxes:
            shared = shard.box.intersection(box) if shard.box.volume else None
            if shared is not None:
                copies.append(
                    Copy(leaf.name, box, shared.seen_from(shard.box).slices,
                         shared.seen_from(box).slices)
                )  # fmt: skip
        if copies:
            direct = (
                len(copies) == 1
                and tensor.numpy == leaf.dtype
                and _covers(copies[0], shard.box)
                and _is_run(copies[0].target, copies[0].box.extent)
            )
            steps.append(Step(number, k, tensor.nbytes(shard.box), tuple(copies), direct))
    return steps


def _covers(copy: Copy, box: Box) -> bool:
    return bool(prod(part.stop - part.start for part in copy.source) == box.volume)


def _is_run(target: tuple[slice, ...], extent: tuple[int, ...]) -> bool:
    """Whether a part of an array is one run of its memory: only the first axes are cut."""
    rest = False
    for part, size in zip(target, extent, strict=True):
        taken = part.stop - part.start
        if rest and taken != size:
            return False
        rest = rest or taken > 1
    return True


def _list(what: str, lines: list[str]) -> str:
    more = f" and {len(lines) - 8} more" if len(lines) > 8 else ""
    return f"{what}: {'; '.join(lines[:8])}{more}"
