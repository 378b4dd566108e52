"""A model with the variables of a checkpoint, instead of those it was made with."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np

from slotstream_worker.engine.model import StreamModel
from slotstream_worker.weights.errors import BadWeights
from slotstream_worker.weights.formats import read_weights
from slotstream_worker.weights.layout import Layout
from slotstream_worker.weights.names import match

log = logging.getLogger(__name__)

_SHOWN = 6


def with_variables(model: StreamModel, path: Path) -> StreamModel:
    """The model with the variables of a file or folder: safetensors, Orbax or Flax msgpack.

    Names are equal up to `/` or `.` between their parts, and a leading `params` may be missing on
    either side. What the checkpoint holds beyond the model's own (an optimiser's state) is passed
    over and logged. Values are cast where that loses nothing.

    Raises:
        BadWeights: the checkpoint cannot be read, or does not fit the model: which leaf, what the
            model has, what was found.
    """
    held = read_weights(path).arrays
    layout = Layout.of(model.variables)
    found, over = match([leaf.name for leaf in layout.leaves], held)
    missing = [leaf for leaf in layout.leaves if leaf.name not in found]
    if missing:
        lines = [f"{leaf.name} {leaf.dtype.name}{list(leaf.shape)}" for leaf in missing]
        other = f"; it has {_some(sorted(over))} instead" if over else ""
        raise BadWeights(f"{path} does not fit {model.name}: it lacks {_some(lines)}{other}")
    wrong = []
    for leaf in layout.leaves:
        array = held[found[leaf.name]]
        if array.shape != leaf.shape or not np.can_cast(array.dtype, leaf.dtype, "safe"):
            expected, got = (
                f"{dtype.name}{list(shape)}"
                for dtype, shape in ((leaf.dtype, leaf.shape), (array.dtype, array.shape))
            )
            wrong.append(f"{leaf.name} is {got}, expected {expected}")
    if wrong:
        raise BadWeights(f"{path} does not fit {model.name}: {_some(wrong)}")
    if over:
        log.info("%s holds more than the model takes: %s", path, _some(sorted(over)))
    buffers = layout.allocate()
    for leaf in layout.leaves:
        array = held[found[leaf.name]]
        for box in leaf.boxes:
            part = tuple(
                slice(start, start + n) for start, n in zip(box.offset, box.extent, strict=True)
            )
            np.copyto(buffers[leaf.name, box], array[part], casting="safe")
    return dataclasses.replace(model, variables=layout.place(buffers))


def _some(lines: list[str]) -> str:
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return ", ".join(lines[:_SHOWN]) + more
