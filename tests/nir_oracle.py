"""A NIR graph run by the book: float64 NumPy, one neuron's equation at a time, nothing clever.

Written against the specification and docs/nir.md, not against the worker's code, with which it
shares no line: equations in their differential form, windows as loops, exact steps by a matrix
exponential.
"""

from __future__ import annotations

from itertools import product

import nir
import numpy as np
from scipy.linalg import expm

CONTINUOUS = (nir.I, nir.IF, nir.LI, nir.LIF, nir.CubaLI, nir.CubaLIF)
SPIKING = (nir.IF, nir.LIF, nir.CubaLIF)


def flatten(graph, prefix=""):
    """Nodes and edges of a graph with the nested ones taken apart."""
    nodes, edges = {}, []

    def end(name, port):
        node = graph.nodes[name]
        if not isinstance(node, nir.NIRGraph):
            return prefix + name
        (found,) = [k for k, n in node.nodes.items() if isinstance(n, port)]
        return f"{prefix}{name}/{found}"

    for name, node in graph.nodes.items():
        if isinstance(node, nir.NIRGraph):
            inner_nodes, inner_edges = flatten(node, f"{prefix}{name}/")
            nodes |= inner_nodes
            edges += inner_edges
        else:
            nodes[prefix + name] = node
    edges += [(end(a, nir.Output), end(b, nir.Input)) for a, b in graph.edges]
    return nodes, edges


class Oracle:
    """Runs a graph step by step; `run` takes `[T, B, *shape]` and gives outputs by name."""

    def __init__(self, graph, dt, reset="value", discretise="euler"):
        self.nodes, self.edges = flatten(graph)
        self.top = set(graph.nodes)
        self.dt, self.reset, self.discretise = dt, reset, discretise
        self.recurrent = self._recurrent()

    def _delay_steps(self, name):
        return np.rint(np.asarray(self.nodes[name].delay, float) / self.dt).astype(int)

    def _waits(self, name):
        node = self.nodes[name]
        return isinstance(node, nir.Delay) and bool((self._delay_steps(name) > 0).all())

    def _recurrent(self):
        """Edges back to a node on the path of a depth-first search from the inputs."""
        back, colour = set(), {}

        def visit(name):
            colour[name] = "open"
            for target in sorted(b for a, b in self.edges if a == name):
                if self._waits(name):
                    continue
                if colour.get(target) == "open":
                    back.add((name, target))
                elif target not in colour:
                    visit(target)
            colour[name] = "done"

        inputs = sorted(n for n in self.top if isinstance(self.nodes.get(n), nir.Input))
        for name in [*inputs, *sorted(self.nodes)]:
            if name not in colour:
                visit(name)
        return back

    def run(self, inputs):
        """Inputs: one array `[T, B, *shape]` a graph input, by name."""
        steps, batch = next(iter(inputs.values())).shape[:2]
        self.batch = batch
        self.state = {}
        self.history = {name: [] for name in self.nodes}
        self.before = {source: self._at_rest(source) for source, _ in self.recurrent}
        outputs = {n: [] for n in self.top if isinstance(self.nodes.get(n), nir.Output)}
        for t in range(steps):
            self.values, self.fed = {}, {n: x[t].astype(float) for n, x in inputs.items()}
            for name in self.nodes:
                self._value(name)
            for name in self.nodes:  # a delay takes its input after all have given
                if isinstance(self.nodes[name], nir.Delay):
                    self.history[name].append(self._input(name))
            self.before = {source: self.values[source] for source in self.before}
            for name, values in outputs.items():
                values.append(self.values[name])
        return {name: np.stack(values) for name, values in outputs.items()}

    def _sources(self, name):
        return [a for a, b in self.edges if b == name]

    def _input(self, name):
        return sum(
            self.before[s] if (s, name) in self.recurrent else self._value(s)
            for s in self._sources(name)
        )

    def _value(self, name):
        if name in self.values:
            return self.values[name]
        node = self.nodes[name]
        if name in self.fed:
            value = self.fed[name]
        elif isinstance(node, nir.Delay):
            value = self._delayed(name)
        elif isinstance(node, CONTINUOUS):
            value = self._neuron(name, node, self._input(name))
        else:
            value = stateless(node, self._input(name))
        self.values[name] = value
        return value

    def _delayed(self, name):
        steps, past = self._delay_steps(name), self.history[name]
        now = None if self._waits(name) else self._input(name)
        out = np.zeros((self.batch, *steps.shape))
        for place in np.ndindex(steps.shape):
            d = steps[place]
            if d == 0:
                out[(slice(None), *place)] = now[(slice(None), *place)]
            elif d <= len(past):
                out[(slice(None), *place)] = past[-d][(slice(None), *place)]
        return out

    def _at_rest(self, name):
        """What a node gives before the first step: no input, no spikes, but biases."""
        node = self.nodes[name]
        if name in self.top and isinstance(node, nir.Input):
            return np.zeros((self.batch, *node.input_type["input"]))
        if isinstance(node, CONTINUOUS):
            return np.zeros((self.batch, *node.r.shape))
        if isinstance(node, nir.Delay) and self._waits(name):
            return np.zeros((self.batch, *node.delay.shape))
        given = 0.0
        for s in self._sources(name):
            rest = self._at_rest(s) if (s, name) not in self.recurrent else None
            given = given + (0.0 if rest is None else rest)
        if np.ndim(given) == 0:
            given = np.zeros((self.batch, *np.asarray(node.input_type["input"]).astype(int)))
        if isinstance(node, nir.Delay):
            return np.where(self._delay_steps(name) == 0, given, 0.0)
        return stateless(node, given)

    def _neuron(self, name, n, x):
        zero = np.zeros((self.batch, *n.r.shape))
        i, v = self.state.get(name, (zero, zero))
        dt = self.dt
        if self.discretise == "exact" and not isinstance(n, (nir.I, nir.IF)):
            i, v = self._exact(n, i, v, x)
        elif isinstance(n, (nir.I, nir.IF)):
            v = v + dt * n.r * x
        elif isinstance(n, (nir.LI, nir.LIF)):
            v = v + dt / n.tau * (n.v_leak - v + n.r * x)
        else:
            i = i + dt / n.tau_syn * (n.w_in * x - i)
            v = v + dt / n.tau_mem * (n.v_leak - v + n.r * i)
        out = v
        if isinstance(n, SPIKING):
            out = np.where(v > n.v_threshold, 1.0, 0.0)
            to = {
                "value": np.broadcast_to(n.v_reset, v.shape),
                "zero": zero,
                "subtract": v - n.v_threshold,
            }
            v = np.where(out == 1.0, to[self.reset], v)
        self.state[name] = (i, v)
        return out

    def _exact(self, n, i, v, x):
        """`d/dt (i, v, 1) = A (i, v, 1)` over one step, each neuron by its own matrix."""
        p = {k: np.broadcast_to(u, x.shape) for k, u in params(n).items()}
        a = np.zeros((*x.shape, 3, 3))
        if isinstance(n, (nir.CubaLI, nir.CubaLIF)):
            a[..., 0, 0] = -1 / p["tau_syn"]
            a[..., 0, 2] = p["w_in"] * x / p["tau_syn"]
            a[..., 1, 0] = p["r"] / p["tau_mem"]
            a[..., 1, 1] = -1 / p["tau_mem"]
            a[..., 1, 2] = p["v_leak"] / p["tau_mem"]
        else:
            a[..., 1, 1] = -1 / p["tau"]
            a[..., 1, 2] = (p["v_leak"] + p["r"] * x) / p["tau"]
        after = expm(a * self.dt) @ np.stack([i, v, np.ones_like(v)], -1)[..., None]
        return after[..., 0, 0], after[..., 1, 0]


def params(node):
    return {k: v for k, v in vars(node).items() if isinstance(v, np.ndarray)}


def stateless(n, x):
    """The output of a node without state, for input `[B, *shape]`."""
    if isinstance(n, (nir.Affine, nir.Linear)):
        y = np.stack([(n.weight.astype(float) * one[..., None, :]).sum(-1) for one in x])
        return y + n.bias if isinstance(n, nir.Affine) else y
    if isinstance(n, nir.Scale):
        return n.scale * x
    if isinstance(n, nir.Threshold):
        return np.where(x > n.threshold, 1.0, 0.0)
    if isinstance(n, nir.Flatten):
        rank = x.ndim - 1
        first, last = int(n.start_dim) % rank, int(n.end_dim) % rank
        middle = int(np.prod(x.shape[1 + first : 2 + last]))
        return x.reshape(*x.shape[: 1 + first], middle, *x.shape[2 + last :])
    if isinstance(n, (nir.Conv1d, nir.Conv2d)):
        return convolve(n, x)
    if isinstance(n, (nir.SumPool2d, nir.AvgPool2d)):
        return pool(n, x)
    return x  # an Input or Output


def pair(value, count):
    return tuple(int(k) for k in np.broadcast_to(np.asarray(value).reshape(-1), (count,)))


def padded(x, before, behind):
    width = [(0, 0)] * (x.ndim - len(before)) + list(zip(before, behind, strict=True))
    return np.pad(x, width)


def convolve(n, x):
    w = np.asarray(n.weight, float)
    dims = w.ndim - 2
    kernel, stride, dilation = w.shape[2:], pair(n.stride, dims), pair(n.dilation, dims)
    padding = (
        n.padding.item()
        if isinstance(n.padding, np.ndarray) and n.padding.dtype.kind in "OSU"
        else n.padding
    )
    if isinstance(padding, (str, bytes)):
        same = padding in ("same", b"same")
        total = [d * (k - 1) if same else 0 for d, k in zip(dilation, kernel, strict=True)]
        before, behind = [t // 2 for t in total], [t - t // 2 for t in total]
    else:
        before = behind = pair(padding, dims)
    x = padded(x, before, behind)
    size = [
        (x.shape[2 + a] - dilation[a] * (kernel[a] - 1) - 1) // stride[a] + 1 for a in range(dims)
    ]
    groups = int(n.groups)
    out_each, in_each = w.shape[0] // groups, w.shape[1]
    y = np.zeros((x.shape[0], w.shape[0], *size))
    for o, at in product(range(w.shape[0]), np.ndindex(*size)):
        first = o // out_each * in_each
        window = x[:, first : first + in_each]
        for a in range(dims):
            index = at[a] * stride[a] + dilation[a] * np.arange(kernel[a])
            window = np.take(window, index, axis=2 + a)
        y[(slice(None), o, *at)] = (window * w[o]).reshape(len(x), -1).sum(1) + n.bias[o]
    return y


def pool(n, x):
    kernel, stride, padding = (pair(v, 2) for v in (n.kernel_size, n.stride, n.padding))
    x = padded(x, padding, padding)
    size = [(x.shape[2 + a] - kernel[a]) // stride[a] + 1 for a in (0, 1)]
    y = np.zeros((*x.shape[:2], *size))
    for r, c in np.ndindex(*size):
        rows = slice(r * stride[0], r * stride[0] + kernel[0])
        columns = slice(c * stride[1], c * stride[1] + kernel[1])
        y[:, :, r, c] = x[:, :, rows, columns].sum((2, 3))
    return y / (kernel[0] * kernel[1]) if isinstance(n, nir.AvgPool2d) else y
