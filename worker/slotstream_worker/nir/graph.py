"""The graph of a tree: nested graphs taken apart, its edges looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slotstream_worker.nir.errors import BadGraph

KINDS = frozenset(
    (
        "Affine",
        "AvgPool2d",
        "Conv1d",
        "Conv2d",
        "CubaLI",
        "CubaLIF",
        "Delay",
        "Flatten",
        "I",
        "IF",
        "Input",
        "LI",
        "LIF",
        "Linear",
        "NIRGraph",
        "Output",
        "Scale",
        "SumPool2d",
        "Threshold",
    )
)
"""NIR's primitives, by their `type`."""

PORT = "Port"
"""What an `Input` or `Output` of a nested graph is: it hands on what it gets."""

Edge = tuple[str, str]


@dataclass(frozen=True)
class Node:
    """One node; `name` is its path through nested graphs, joined with `/`."""

    name: str
    kind: str
    fields: Mapping[str, Any]

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.kind})"


@dataclass(frozen=True)
class Graph:
    """A graph without nested ones. Edges are sorted: their order in a file says nothing."""

    nodes: Mapping[str, Node]
    edges: tuple[Edge, ...]

    def of_kind(self, kind: str) -> tuple[str, ...]:
        """Names of the nodes of one kind, sorted."""
        return tuple(sorted(name for name, node in self.nodes.items() if node.kind == kind))

    def sources(self) -> dict[str, tuple[str, ...]]:
        """Of each node, the names of those whose outputs add up to its input, sorted."""
        found: dict[str, list[str]] = {name: [] for name in self.nodes}
        for source, target in self.edges:
            found[target].append(source)
        return {name: tuple(sources) for name, sources in found.items()}


def graph_of(tree: Mapping[str, Any]) -> Graph:
    """The graph that a tree (`hdf5.Tree`) describes.

    Where a node has no edge into it, an input is put before it, and where it has none out of it
    an output behind it, as `nir` itself does. What leads to no output is left out.

    Raises:
        BadGraph: an unknown primitive, an edge to nowhere, a doubled edge, no output.
    """
    if _kind("", tree) != "NIRGraph":
        tree = {"type": "NIRGraph", "nodes": {"node": tree}, "edges": np.zeros((0, 2), object)}
    nodes: dict[str, Node] = {}
    edges = list(_unnested("", tree, nodes))
    if doubled := sorted(edge for edge, count in Counter(edges).items() if count > 1):
        raise BadGraph(
            f"the edge {doubled[0]} is there more than once; whether it counts twice NIR does not "
            "say. Leave one, or scale its weights"
        )
    _ended(nodes, edges)
    graph = Graph(nodes, tuple(sorted(edges)))
    if not graph.of_kind("Output"):
        raise BadGraph(
            "the graph has no Output, and every node feeds another; add an Output node to the "
            "one whose values are wanted"
        )
    return _useful(graph)


def _kind(name: str, tree: Mapping[str, Any]) -> str:
    kind = tree.get("type")
    called = f"node {name!r}" if name else "the graph"
    if not isinstance(kind, str):
        raise BadGraph(f"{called} has no 'type'; every NIR node names its primitive there")
    if kind not in KINDS:
        raise BadGraph(
            f"{called} is of type {kind!r}, which is no primitive of NIR 1.0.8; those are "
            f"{', '.join(sorted(KINDS))}"
        )
    return kind


def _unnested(path: str, tree: Mapping[str, Any], nodes: dict[str, Node]) -> Iterator[Edge]:
    """Fill in the nodes of a graph and of those nested in it; gives all their edges."""
    held = tree.get("nodes")
    called = f"node {path!r}" if path else "the graph"
    if not isinstance(held, Mapping) or not held:
        raise BadGraph(f"{called} has no nodes")
    kinds: dict[str, str] = {}
    for name, inside in held.items():
        whole = f"{path}/{name}" if path else str(name)
        if not isinstance(inside, Mapping):
            raise BadGraph(f"node {whole!r} is a value, not a group with a 'type'")
        kind = kinds[str(name)] = _kind(whole, inside)
        if kind == "NIRGraph":
            yield from _unnested(whole, inside, nodes)
        elif path and kind in ("Input", "Output"):
            nodes[whole] = Node(whole, PORT, inside)
        else:
            nodes[whole] = Node(whole, kind, inside)
    for source, target in _pairs(called, tree.get("edges")):
        yield (
            _end(path, source, kinds, held, "Output", f"{source} -> {target}"),
            _end(path, target, kinds, held, "Input", f"{source} -> {target}"),
        )


def _pairs(called: str, edges: Any) -> list[Edge]:
    if edges is None:
        raise BadGraph(f"{called} has no 'edges'")
    pairs = np.asarray(edges)
    if pairs.size == 0:
        return []
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "OUS":
        raise BadGraph(
            f"{called} has edges of shape {list(pairs.shape)} and type {pairs.dtype}; edges are "
            "pairs of names, [n, 2]"
        )
    return [(_text(a), _text(b)) for a, b in pairs.tolist()]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _end(
    path: str,
    name: str,
    kinds: Mapping[str, str],
    held: Mapping[str, Any],
    port: str,
    edge: str,
) -> str:
    """The node that an end of an edge means; of a nested graph, its input or output."""
    inside = f"{path}/" if path else ""
    if name in kinds and kinds[name] != "NIRGraph":
        return inside + name
    if name in kinds:
        ports = sorted(k for k, node in held[name]["nodes"].items() if node.get("type") == port)
        if len(ports) == 1:
            return f"{inside}{name}/{ports[0]}"
        raise BadGraph(
            f"the edge {edge} leads to the nested graph {inside + name!r}, whose {port} nodes are "
            f"{ports}; name one of them, as {name}.{ports[0] if ports else port.lower()}"
        )
    outer, _, inner = name.rpartition(".")  # a port by name, `graph.port`, as NIRTorch takes it
    if kinds.get(outer) == "NIRGraph" and held[outer]["nodes"].get(inner, {}).get("type") == port:
        return f"{inside}{outer}/{inner}"
    raise BadGraph(
        f"the edge {edge} names {name!r}, and there is no such node"
        f"{f' in {path!r}' if path else ''}; there are {sorted(kinds)[:12]}"
    )


def _ended(nodes: dict[str, Node], edges: list[Edge]) -> None:
    """Put inputs before nodes that nothing feeds, outputs behind nodes that feed nothing."""
    fed, feeding = {b for _, b in edges}, {a for a, _ in edges}
    for name, node in sorted(nodes.items()):
        if name in fed and node.kind == "Input":
            raise BadGraph(f"{node} has an edge into it; an Input only gives")
        if name in feeding and node.kind == "Output":
            raise BadGraph(f"{node} has an edge out of it; an Output only takes")
        if name not in fed and node.kind == "Output":
            raise BadGraph(f"{node} has no edge into it, so it would give nothing")
        if name not in fed and node.kind != "Input":
            first = _free(f"input_{name}", nodes)
            nodes[first] = Node(first, "Input", {})
            edges.append((first, name))
        if name not in feeding and node.kind not in ("Input", "Output"):
            last = _free(f"output_{name}", nodes)
            nodes[last] = Node(last, "Output", {})
            edges.append((name, last))


def _free(name: str, nodes: Mapping[str, Node]) -> str:
    while name in nodes:
        name += "_"
    return name


def _useful(graph: Graph) -> Graph:
    """Without the nodes that lead to no output; inputs stay, since a frame holds them."""
    before: dict[str, list[str]] = {}
    for source, target in graph.edges:
        before.setdefault(target, []).append(source)
    kept, todo = set[str](), list(graph.of_kind("Output"))
    while todo:
        if (name := todo.pop()) not in kept:
            kept.add(name)
            todo += before.get(name, ())
    nodes = {k: n for k, n in graph.nodes.items() if k in kept or n.kind == "Input"}
    return Graph(nodes, tuple(edge for edge in graph.edges if edge[1] in kept))
