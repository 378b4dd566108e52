"""A node's fields as checked arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from slotstream_worker.nir.errors import BadGraph
from slotstream_worker.nir.graph import Node

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

MAX_WHOLE = 2**31 - 1
"""The largest whole number that a shape, stride or padding may have."""


class Fields:
    """Reads the fields of one node; every error names the node and the field."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def bad(self, message: str) -> BadGraph:
        """An error about this node."""
        return BadGraph(f"{self.node}: {message}")

    def has(self, name: str) -> bool:
        """Whether the node has the field."""
        return name in self.node.fields

    def reals(self, name: str, default: float | None = None, infinite: bool = False) -> Array:
        """A field of real numbers, float64; `infinite` lets plus infinity pass.

        Raises:
            BadGraph: it is missing, no numbers, or not finite.
        """
        with np.errstate(invalid="ignore", over="ignore"):  # looked for below
            value = self._numbers(name, default).astype(np.float64)
        wrong = np.isnan(value) | (value == -np.inf) if infinite else ~np.isfinite(value)
        if wrong.any():
            first = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            raise self.bad(
                f"its {name!r} {list(value.shape)} holds {int(wrong.sum())} values that are not "
                f"finite, the first {value[first]} at {[int(i) for i in first]}; was the training "
                "stable?"
            )
        return value

    def positive(self, name: str, unit: str = "") -> Array:
        """A field of numbers above 0."""
        value = self.reals(name)
        if (value <= 0).any():
            raise self.bad(
                f"its {name!r} is at least {value.min():g}, and every value must be above 0{unit}"
            )
        return value

    def whole(self, name: str, count: int, least: int, default: int | None = None) -> Shape:
        """`count` whole numbers from a field of one or of `count`."""
        value = self._numbers(name, default)
        flat = value.reshape(-1)
        odd = (flat != np.round(flat)) | (flat < least) | (flat > MAX_WHOLE)
        if flat.size not in (1, count) or odd.any():
            raise self.bad(
                f"its {name!r} is {value.tolist()}, and {count} whole number"
                f"{'s' * (count > 1)} of {least} or more {'are' if count > 1 else 'is'} needed"
            )
        return tuple(int(n) for n in np.broadcast_to(flat, (count,)))

    def shape(self, name: str) -> Shape | None:
        """A field that is the shape of an array; None where the node has none."""
        if not self.has(name):
            return None
        value = self._numbers(name, None).reshape(-1)
        if ((value != np.round(value)) | (value < 1) | (value > MAX_WHOLE)).any():
            raise self.bad(f"its {name!r} is {value.tolist()}; a shape is of whole numbers above 0")
        return tuple(int(n) for n in value)

    def text(self, name: str) -> str | None:
        """A field of text, None where it is of anything else."""
        value = self.node.fields.get(name)
        if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "US":
            value = value.item()
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        return value if isinstance(value, str) else None

    def _numbers(self, name: str, default: float | None) -> Array:
        value = self.node.fields.get(name, default)
        if value is None:
            raise self.bad(
                f"it has no {name!r}; it has {sorted(k for k in self.node.fields if k != 'type')}"
            )
        array = np.asarray(value)
        if array.dtype.kind not in "iufb":
            raise self.bad(f"its {name!r} is {value!r}, and numbers are needed")
        return array


def common(fields: Fields, values: dict[str, Array], incoming: Shape | None) -> Shape:
    """The one shape of a node's parameters, or that of its input where all are scalars.

    Raises:
        BadGraph: the shapes differ, or there is nothing to take one from.
    """
    shapes = {name: value.shape for name, value in values.items() if value.ndim}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise fields.bad(f"its parameters have different shapes: {listed}; all must have one")
    if shapes:
        return next(iter(shapes.values()))
    if incoming is None:
        raise fields.bad("its parameters are scalars and nothing before it says its shape")
    return incoming


def listed(shape: Shape | None) -> str:
    """A shape as messages show it."""
    return "unknown" if shape is None else str(list(shape))
