"""Primitives without state: linear maps, convolutions, pools, Flatten, Scale, Threshold."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slotstream_worker.nir.fields import Fields, Shape, common, listed
from slotstream_worker.nir.operator import Operator, Weights, expect, row

# Spikes hang on the last bits of a sum, so no device may round its factors to fewer.
EXACT = lax.Precision.HIGHEST


class Linear(Operator):
    """`y[o] = sum_i W[o, i] x[i] (+ b[o])`; axes of W before its last two are shared with x."""

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """See `Operator.apply`."""
        w = weights["weight"]
        if w.ndim == 2:
            y = jnp.matmul(x, w.T, precision=EXACT)
        else:
            y = jnp.einsum("...oi,b...i->b...o", w, x, precision=EXACT)
        return y + row(weights["bias"]) if "bias" in weights else y


class Scale(Operator):
    """`y = s x`, elementwise."""

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """See `Operator.apply`."""
        return x * row(weights["scale"])


class Threshold(Operator):
    """`y = 1 where x > threshold else 0`, strictly."""

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """See `Operator.apply`."""
        return (x > row(weights["threshold"])).astype(x.dtype)


class Flatten(Operator):
    """Axes `start_dim` to `end_dim` of the sample as one, in C order."""

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """See `Operator.apply`."""
        del weights
        return x.reshape((x.shape[0], *self.gives))


@dataclass(frozen=True)
class Window(Operator):
    """What slides over the trailing axes: `[channels, *space]`."""

    kernel: Shape = ()
    stride: Shape = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: Shape = ()
    groups: int = 1


class Conv(Window):
    """Cross-correlation as `torch.nn.Conv2d`'s, with a weight `[out, in / groups, *kernel]`."""

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """See `Operator.apply`."""
        y = lax.conv_general_dilated(
            x,
            weights["weight"],
            self.stride,
            self.padding,
            rhs_dilation=self.dilation,
            feature_group_count=self.groups,
            precision=EXACT,
        )
        return y + row(weights["bias"]).reshape((1, -1) + (1,) * len(self.kernel))


class SumPool2d(Window):
    """The sum over each window; padding adds zeros."""

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """See `Operator.apply`."""
        del weights
        return lax.reduce_window(
            x,
            jnp.zeros((), x.dtype),
            lax.add,
            (1, 1, *self.kernel),
            (1, 1, *self.stride),
            ((0, 0), (0, 0), *self.padding),
        )


class AvgPool2d(SumPool2d):
    """The mean over each window, padding counted, as `torch.nn.AvgPool2d`."""

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """See `Operator.apply`."""
        return super().apply(weights, x) / prod(self.kernel)


def make_linear(fields: Fields, incoming: Shape | None, bias: bool = True) -> Operator:
    """Affine and Linear. `bias=False` leaves that of an Affine out."""
    weight = fields.reals("weight")
    if weight.ndim < 2:
        raise fields.bad(f"its 'weight' has shape {list(weight.shape)}; [..., out, in] is needed")
    takes = (*weight.shape[:-2], weight.shape[-1])
    gives = weight.shape[:-1]
    weights = {"weight": weight}
    if fields.node.kind == "Affine":
        offset = fields.reals("bias")
        if offset.shape not in ((), gives):
            raise fields.bad(
                f"its 'bias' has shape {list(offset.shape)} and its 'weight' "
                f"{list(weight.shape)}; the bias must be {list(gives)}"
            )
        if bias:
            weights["bias"] = np.broadcast_to(offset, gives)
    return Linear(expect(fields, incoming, takes), gives, weights)


def make_elementwise(fields: Fields, incoming: Shape | None) -> Operator:
    """Scale and Threshold."""
    kind, name = (Scale, "scale") if fields.node.kind == "Scale" else (Threshold, "threshold")
    value = fields.reals(name, infinite=kind is Threshold)
    shape = expect(fields, incoming, common(fields, {name: value}, incoming))
    return kind(shape, shape, {name: np.broadcast_to(value, shape)})


def make_flatten(fields: Fields, incoming: Shape | None) -> Operator:
    """Flatten; its axes are counted on the sample, without batch."""
    takes = expect(fields, incoming, fields.shape("input_type"))
    rank = len(takes)
    (start,) = fields.whole("start_dim", 1, -rank, default=1)
    (end,) = fields.whole("end_dim", 1, -rank, default=-1)
    first, last = start % rank if rank else 0, end % rank if rank else 0
    if not rank or start >= rank or end >= rank or first > last:
        raise fields.bad(
            f"it flattens axes {start} to {end} of an input {listed(takes)}, which has no such "
            "axes in that order (they are counted without the batch)"
        )
    gives = (*takes[:first], prod(takes[first : last + 1]), *takes[last + 1 :])
    return Flatten(takes, gives)


def make_conv(fields: Fields, incoming: Shape | None) -> Operator:
    """Conv1d and Conv2d."""
    dims = 1 if fields.node.kind == "Conv1d" else 2
    weight = fields.reals("weight")
    if weight.ndim != 2 + dims:
        raise fields.bad(
            f"its 'weight' has shape {list(weight.shape)}; [out, in / groups, "
            f"{'*kernel' if dims > 1 else 'kernel'}] of {2 + dims} axes is needed"
        )
    out, each, *kernel = weight.shape
    (groups,) = fields.whole("groups", 1, 1, default=1)
    if out % groups:
        raise fields.bad(f"it has {out} channels in {groups} groups, which do not divide them")
    bias = fields.reals("bias", default=0.0)
    if bias.shape not in ((), (out,)):
        raise fields.bad(f"its 'bias' has shape {list(bias.shape)}; [{out}] is needed")
    space = fields.shape("input_shape")
    if space is not None and len(space) != dims:
        raise fields.bad(f"its 'input_shape' is {list(space)}; {dims} numbers are needed")
    takes = expect(fields, incoming, (each * groups, *space) if space else None)
    if len(takes) != 1 + dims or takes[0] != each * groups:
        raise fields.bad(
            f"its 'weight' {list(weight.shape)} in {groups} groups takes "
            f"[{each * groups}, {'N' if dims == 1 else 'H, W'}], and what leads to it gives "
            f"{listed(takes)}"
        )
    stride = fields.whole("stride", dims, 1, default=1)
    dilation = fields.whole("dilation", dims, 1, default=1)
    padding = _padding(fields, dims, tuple(kernel), stride, dilation)
    gives = _slid(fields, takes[1:], tuple(kernel), stride, padding, dilation)
    weights = {"weight": weight, "bias": np.broadcast_to(bias, (out,))}
    return Conv(takes, (out, *gives), weights, tuple(kernel), stride, padding, dilation, groups)


def make_pool(fields: Fields, incoming: Shape | None) -> Operator:
    """SumPool2d and AvgPool2d."""
    takes = expect(fields, incoming, None)
    if len(takes) != 3:
        raise fields.bad(f"it pools [channels, height, width], and gets {listed(takes)}")
    kernel = fields.whole("kernel_size", 2, 1)
    stride = fields.whole("stride", 2, 1)
    padding = _padding(fields, 2, kernel, stride, (1, 1))
    gives = _slid(fields, takes[1:], kernel, stride, padding, (1, 1))
    kind = SumPool2d if fields.node.kind == "SumPool2d" else AvgPool2d
    return kind(takes, (takes[0], *gives), {}, kernel, stride, padding)


def _padding(
    fields: Fields, dims: int, kernel: Shape, stride: Shape, dilation: Shape
) -> tuple[tuple[int, int], ...]:
    """Zeros before and behind each axis; `same` and `valid` as PyTorch has them."""
    text = fields.text("padding")
    if text is None:
        return tuple((n, n) for n in fields.whole("padding", dims, 0, default=0))
    if text == "valid":
        return ((0, 0),) * dims
    if text != "same":
        raise fields.bad(f"its 'padding' is {text!r}; 'same', 'valid' or whole numbers are needed")
    if max(stride) > 1:
        raise fields.bad(f"its 'padding' is 'same', which needs a stride of 1, not {list(stride)}")
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    return tuple((n // 2, n - n // 2) for n in total)


def _slid(
    fields: Fields,
    space: Shape,
    kernel: Shape,
    stride: Shape,
    padding: tuple[tuple[int, int], ...],
    dilation: Shape,
) -> Shape:
    """How many places the window has along each axis."""
    places = tuple(
        (n + sum(p) - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(space, kernel, stride, padding, dilation, strict=True)
    )
    if min(places) < 1:
        raise fields.bad(
            f"its window of {list(kernel)} does not fit into an input of {list(space)}"
        )
    return places
