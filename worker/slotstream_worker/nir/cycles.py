"""The order of the nodes within a time step, and the edges that are one step old.

A cycle runs because something in it holds a value over time. A node whose output does not
depend on its input of the same step (a `Delay` of at least one step; a neuron that spikes before
it is updated) breaks its cycles by itself. Of any other cycle one edge, the *recurrent* one,
carries the value of the step before, as frameworks do it.

Which one: a depth-first search from the inputs, which visits names in sorted order, meets each
cycle at the node where it is entered; the edge that leads back to that node is the recurrent
one. In `input -> lif -> w_rec -> lif` it is `w_rec -> lif`. The search needs no order of the
edges in the file, which NIR leaves open.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from slotstream_worker.nir.errors import BadGraph
from slotstream_worker.nir.graph import Edge


def search(
    roots: Iterable[str], names: Iterable[str], edges: Collection[Edge]
) -> tuple[list[str], set[Edge]]:
    """Depth first from the roots, then from what is left: the order found, and the edges back.

    Returns:
        The names such that every edge but those back goes from an earlier to a later one; the
        edges that lead back to a node on the way that led there.
    """
    after = _after(edges)
    order: list[str] = []
    back: set[Edge] = set()
    open_, done = set[str](), set[str]()
    for root in [*roots, *sorted(names)]:
        if root in done:
            continue
        stack = [(root, iter(after.get(root, ())))]
        open_.add(root)
        while stack:
            name, rest = stack[-1]
            for target in rest:
                if target in open_:
                    back.add((name, target))
                elif target not in done:
                    open_.add(target)
                    stack.append((target, iter(after.get(target, ()))))
                    break
            else:
                stack.pop()
                open_.discard(name)
                done.add(name)
                order.append(name)
    order.reverse()
    return order, back


def cyclic(names: Iterable[str], edges: Collection[Edge]) -> dict[str, int]:
    """The nodes that lie on a cycle, each with the number of its strongly connected component.

    Kosaraju's method: a search, then one against the edges in the order found.
    """
    order, _ = search((), names, edges)
    before = _after([(b, a) for a, b in edges])
    component: dict[str, int] = {}
    for number, root in enumerate(order):
        todo = [root]
        while todo:
            if (name := todo.pop()) not in component:
                component[name] = number
                todo += before.get(name, ())
    sizes: dict[int, int] = {}
    for number in component.values():
        sizes[number] = sizes.get(number, 0) + 1
    loops = {a for a, b in edges if a == b}
    return {n: c for n, c in component.items() if sizes[c] > 1 or n in loops}


def check_loops(names: Iterable[str], edges: Collection[Edge], holding: Collection[str]) -> None:
    """Refuse a cycle without a node that holds a value over time.

    In NIR's continuous time that is an algebraic loop: `y = A(x + B y)`, to be solved at every
    instant. A delay of one step would make it a recurrence, but one whose meaning is the time
    step, which is no property of the graph.

    Raises:
        BadGraph: with the cycle.
    """
    within = [(a, b) for a, b in edges if a not in holding and b not in holding]
    loose = cyclic((n for n in names if n not in holding), within)
    if loose:
        first = min(loose)
        members = sorted(n for n, c in loose.items() if c == loose[first])
        raise BadGraph(
            f"the cycle through {', '.join(map(repr, members))} holds no neuron, integrator or "
            "delay, so its values at one instant depend on themselves (an algebraic loop). Put "
            "a Delay of at least one time step into it, or the neuron that was left out"
        )


def _after(edges: Iterable[Edge]) -> Mapping[str, Sequence[str]]:
    found: dict[str, list[str]] = {}
    for source, target in sorted(edges):
        found.setdefault(source, []).append(target)
    return found
