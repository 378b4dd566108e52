"""Random NIR graphs of every primitive: joins, cycles, delays, nested graphs, several ends."""

from __future__ import annotations

import nir
import numpy as np

DT = 1e-3


class Maker:
    """Grows a graph from its input; `ends` are nodes that others may be put behind."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.nodes, self.edges, self.shapes = {}, [], {}
        self.count = 0

    def name(self, kind):
        self.count += 1
        letter = "abcdefghijklmnopqrstuvwxyz"[int(self.rng.integers(26))]
        return f"{letter}{self.count}.{kind.lower()}"

    def add(self, node, shape, *sources):
        name = self.name(type(node).__name__)
        self.nodes[name], self.shapes[name] = node, tuple(int(n) for n in shape)
        self.edges += [(source, name) for source in dict.fromkeys(sources)]
        return name

    def normal(self, *shape, scale=1.0):
        return self.rng.normal(0, scale, shape)

    def between(self, low, high, shape):
        return self.rng.uniform(low, high, shape)

    def choose(self, *options):
        return options[int(self.rng.integers(len(options)))]

    def neuron(self, shape):
        """Any neuron or integrator, with leaks, resets and gains that are not 0 or 1."""
        kind = self.choose(nir.I, nir.IF, nir.LI, nir.LIF, nir.CubaLI, nir.CubaLIF)
        r = self.between(0.5, 3, shape)
        tau = {"tau": self.between(2, 20, shape) * DT}
        mem = {
            "tau_mem": self.between(2, 20, shape) * DT,
            "tau_syn": self.between(1, 8, shape) * DT,
        }
        if self.rng.random() < 0.3:
            mem["tau_syn"] = mem["tau_mem"].copy()
        leak = {"v_leak": self.normal(*shape, scale=0.3)}
        fire = {
            "v_threshold": self.between(0.1, 0.8, shape),
            "v_reset": self.normal(*shape, scale=0.1),
        }
        w_in = {"w_in": self.between(0.5, 4, shape)}
        if kind is nir.I:
            return nir.I(r=r)
        if kind is nir.IF:
            return nir.IF(r=r / DT / 4, **fire)
        if kind is nir.LI:
            return nir.LI(r=r, **tau, **leak)
        if kind is nir.LIF:
            return nir.LIF(r=r * 3, **tau, **leak, **fire)
        if kind is nir.CubaLI:
            return nir.CubaLI(r=r, **mem, **leak, **w_in)
        return nir.CubaLIF(r=r * 3, **mem, **leak, **fire, **w_in)

    def linear(self, shape_in, shape_out):
        lead = shape_in[:-1]
        weight = self.normal(*lead, shape_out[-1], shape_in[-1]) / np.sqrt(shape_in[-1])
        if self.rng.random() < 0.5:
            return nir.Linear(weight=weight)
        return nir.Affine(weight=weight, bias=self.normal(*lead, shape_out[-1], scale=0.3))

    def image(self, source):
        """Convolutions and pools down to a vector."""
        channels, height, width = self.shapes[source]
        groups = self.choose(1, channels)
        out = groups * int(self.rng.integers(1, 3))
        kernel = tuple(int(k) for k in self.rng.integers(1, 4, 2))
        padding = self.choose((1, 2), "same", "valid")
        stride = (1, 1) if padding == "same" else (1, 2)
        conv = nir.Conv2d(
            input_shape=(height, width),
            weight=self.normal(out, channels // groups, *kernel),
            stride=stride,
            padding=padding,
            dilation=(1, self.choose(1, 2)),
            groups=groups,
            bias=self.normal(out, scale=0.2),
        )
        dilated = [d * (k - 1) + 1 for d, k in zip(conv.dilation, kernel, strict=True)]
        pads = (1, 2) if isinstance(padding, tuple) else (0, 0)
        if padding == "same":
            space = (height, width)
        else:
            space = tuple(
                (n + 2 * p - k) // s + 1
                for n, p, k, s in zip((height, width), pads, dilated, stride, strict=True)
            )
        at = self.add(conv, (out, *space), source)
        at = self.add(self.neuron((out, *space)), (out, *space), at)
        pool = self.choose(nir.SumPool2d, nir.AvgPool2d)
        node = pool(kernel_size=np.array([2, 2]), stride=np.array([1, 2]), padding=np.array([1, 0]))
        pooled = (out, (space[0] + 2 - 2) // 1 + 1, (space[1] - 2) // 2 + 1)
        at = self.add(node, pooled, at)
        start = self.choose(0, 1)
        flat = (int(np.prod(pooled)),) if start == 0 else (pooled[0], int(np.prod(pooled[1:])))
        at = self.add(
            nir.Flatten({"input": np.array(pooled)}, start_dim=start, end_dim=-1), flat, at
        )
        at = self.add(self.linear(flat, (*flat[:-1], 5)), (*flat[:-1], 5), at)
        if len(flat) > 1:
            whole = (int(np.prod(self.shapes[at])),)
            shape = {"input": np.array(self.shapes[at])}
            at = self.add(nir.Flatten(shape, start_dim=0, end_dim=-1), whole, at)
        return self.widened(at)

    def signal(self, source):
        """A Conv1d over `[channels, N]`, flattened."""
        channels, length = self.shapes[source]
        conv = nir.Conv1d(
            input_shape=length,
            weight=self.normal(3, channels, 2),
            stride=2,
            padding=self.choose(1, 0),
            dilation=2,
            groups=1,
            bias=self.normal(3),
        )
        places = (length + 2 * conv.padding - 3) // 2 + 1
        at = self.add(conv, (3, places), source)
        shape = {"input": np.array([3, places])}
        at = self.add(nir.Flatten(shape, start_dim=0, end_dim=1), (3 * places,), at)
        return self.widened(at)

    def shapes_into(self, target):
        """The shape of what a node takes."""
        source = next(a for a, b in self.edges if b == target)
        return self.shapes[source]

    def widened(self, source, width=4):
        return self.add(self.linear(self.shapes[source], (width,)), (width,), source)

    def nested(self, source):
        """A graph in the graph: a neuron, recurrent through a map."""
        shape = self.shapes[source]
        neuron = self.neuron(shape)
        inner = nir.NIRGraph(
            nodes={
                "in": nir.Input({"input": np.array(shape)}),
                "cell": neuron,
                "w_rec": self.linear(shape, shape),
                "out": nir.Output({"output": np.array(shape)}),
            },
            edges=[("in", "cell"), ("cell", "w_rec"), ("w_rec", "cell"), ("cell", "out")],
            type_check=False,
        )
        return self.add(inner, shape, source)


def random_graph(seed):
    """A graph and the shapes of its inputs by name."""
    m = Maker(seed)
    shape = m.choose((4,), (4,), (2, 6, 7), (2, 9))
    m.nodes["in"], m.shapes["in"] = nir.Input({"input": np.array(shape)}), shape
    inputs = {"in": shape}
    vectors = [{1: m.widened, 2: m.signal, 3: m.image}[len(shape)]("in")]
    if m.rng.random() < 0.3:
        m.nodes["also"], m.shapes["also"] = nir.Input({"input": np.array([3])}), (3,)
        inputs["also"] = (3,)
        vectors.append(m.widened("also"))
    for _ in range(int(m.rng.integers(3, 8))):
        count = min(len(vectors), int(m.rng.integers(1, 3)))
        sources = [vectors[k] for k in m.rng.choice(len(vectors), count, replace=False)]
        what = m.choose("neuron", "neuron", "linear", "scale", "threshold", "delay", "nested")
        node = {
            "neuron": lambda: m.neuron((4,)),
            "linear": lambda: m.linear((4,), (4,)),
            "scale": lambda: nir.Scale(scale=m.normal(4)),
            "threshold": lambda: nir.Threshold(threshold=m.normal(4, scale=0.3)),
            "delay": lambda: nir.Delay(delay=m.rng.integers(m.choose(0, 1), 4, 4) * DT),
        }
        if what == "nested":
            vectors.append(m.nested(sources[0]))
        else:
            vectors.append(m.add(node[what](), (4,), *sources))
    for _ in range(int(m.rng.integers(0, 3))):  # cycles, through a map and perhaps a delay
        later, earlier = sorted(m.rng.choice(len(vectors), 2), reverse=True)
        target = vectors[earlier]
        if isinstance(m.nodes[target], nir.NIRGraph):
            continue
        at = m.add(m.neuron((4,)), (4,), vectors[later])
        if len(m.shapes_into(target)) > 1:
            continue
        at = m.add(m.linear((4,), m.shapes_into(target)), m.shapes_into(target), at)
        if m.rng.random() < 0.4:
            delay = m.rng.integers(1, 4, m.shapes[at]) * DT
            at = m.add(nir.Delay(delay=delay), m.shapes[at], at)
        m.edges.append((at, target))
    ends = [n for n in m.nodes if n not in {a for a, _ in m.edges}] or vectors[-1:]
    for k, end in enumerate(ends):
        m.nodes[f"out{k}"] = nir.Output({"output": np.array(m.shapes[end])})
        m.edges.append((end, f"out{k}"))
    order = m.rng.permutation(len(m.edges))
    names = list(m.rng.permutation(list(m.nodes)))
    nodes = {str(n): m.nodes[n] for n in names}
    return nir.NIRGraph(nodes, [m.edges[k] for k in order], type_check=False), inputs
