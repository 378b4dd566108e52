"""A graph as one function of a time step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from slotstream_worker.nir import cycles
from slotstream_worker.nir.delay import make_delay, steps_of
from slotstream_worker.nir.errors import BadGraph
from slotstream_worker.nir.fields import Fields, Shape, listed
from slotstream_worker.nir.graph import PORT, Graph, Node
from slotstream_worker.nir.layers import (
    make_conv,
    make_elementwise,
    make_flatten,
    make_linear,
    make_pool,
)
from slotstream_worker.nir.neurons import make_neuron
from slotstream_worker.nir.operator import MAX_VALUES, Operator, State, Weights, expect
from slotstream_worker.nir.settings import Settings

Values = dict[str, jax.Array]
Make = Callable[[Fields, Shape | None], Operator]

LAYERS: Mapping[str, Make] = {
    "Linear": make_linear,
    "Scale": make_elementwise,
    "Threshold": make_elementwise,
    "Flatten": make_flatten,
    "Conv1d": make_conv,
    "Conv2d": make_conv,
    "SumPool2d": make_pool,
    "AvgPool2d": make_pool,
}
NEURONS = frozenset(("I", "IF", "LI", "LIF", "CubaLI", "CubaLIF"))


@dataclass(frozen=True)
class Program:
    """What runs in a time step, in order.

    `now` and `late` are each node's sources: values of this step, and of the step before. A
    node's input is their sum, in the order of their names. A frame's sample is the graph's
    input; several inputs are flattened and joined in the order of their names.
    """

    operators: Mapping[str, Operator]
    order: tuple[str, ...]
    now: Mapping[str, tuple[str, ...]]
    late: Mapping[str, tuple[str, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bias_at_rest: bool

    @property
    def sample_shape(self) -> Shape:
        """Shape of one time step of one session."""
        shapes = [self.operators[name].gives for name in self.inputs]
        return shapes[0] if len(shapes) == 1 else (sum(map(prod, shapes)),)

    @property
    def remembered(self) -> tuple[str, ...]:
        """Nodes whose output of the step before is part of the state."""
        return tuple(sorted({source for sources in self.late.values() for source in sources}))

    def rest(self, weights: Mapping[str, Weights], batch: int, dtype: Any) -> dict[str, Any]:
        """The state that a session starts from.

        What recurrent edges carry into the first step is what their sources give for no input
        and no spikes, their biases, unless the semantics say that it is nothing.
        """
        zeros = {
            name: jnp.zeros((batch, *self.operators[name].gives), dtype) for name in self.operators
        }
        values: Values = dict(zeros)
        if self.remembered and self.bias_at_rest:
            for name in self.order:
                operator = self.operators[name]
                if name not in self.inputs:
                    given = [values[s] for s in self.now[name]]
                    given += [zeros[s] for s in self.late[name]]
                    values[name] = operator.quiet(weights.get(name, {}), _sum(given))
        held = {name: op.rest(batch, dtype) for name, op in self.operators.items() if op.holds}
        return {"nodes": held, "recurrent": {name: values[name] for name in self.remembered}}

    def step(
        self, weights: Mapping[str, Weights], state: Mapping[str, Any], x: jax.Array
    ) -> tuple[dict[str, Any], Any]:
        """One step: input `[batch, *sample_shape]`; gives the state after it and the outputs."""
        held: Mapping[str, State] = state["nodes"]
        values = self._split(x)
        for name in self.order:
            if self.operators[name].early:
                values[name] = self.operators[name].emit(weights.get(name, {}), held[name])
        after: dict[str, State] = {}
        for name in self.order:
            if name in self.inputs:
                continue
            operator = self.operators[name]
            given = [values[s] for s in self.now[name]]
            given += [state["recurrent"][s] for s in self.late[name]]
            new, value = operator.step(weights.get(name, {}), held.get(name, {}), _sum(given))
            values.setdefault(name, value)
            if operator.holds:
                after[name] = new
        outputs = {name: values[name] for name in self.outputs}
        recurrent = {name: values[name] for name in self.remembered}
        given_out = outputs[self.outputs[0]] if len(outputs) == 1 else outputs
        return {"nodes": after, "recurrent": recurrent}, given_out

    def _split(self, x: jax.Array) -> Values:
        if len(self.inputs) == 1:
            return {self.inputs[0]: x}
        values: Values = {}
        start = 0
        for name in self.inputs:
            shape = self.operators[name].gives
            part = x[:, start : start + prod(shape)]
            values[name] = part.reshape((x.shape[0], *shape))
            start += prod(shape)
        return values


def _sum(given: list[jax.Array]) -> jax.Array:
    total = given[0]
    for value in given[1:]:
        total = total + value
    return total


def compile_graph(graph: Graph, settings: Settings) -> Program:
    """Order a graph and make its operators, with every shape checked.

    Raises:
        BadGraph: names the node and what is wrong.
    """
    early, holding = _over_time(graph, settings)
    names = tuple(graph.nodes)
    cycles.check_loops(names, graph.edges, holding)
    on_cycle = cycles.cyclic(names, graph.edges)
    inputs = graph.of_kind("Input")
    waited_for = [edge for edge in graph.edges if edge[0] not in early]
    order, back = cycles.search(inputs, names, waited_for)
    sources = graph.sources()
    late = {name: tuple(s for s in sources[name] if (s, name) in back) for name in names}
    now = {name: tuple(s for s in sources[name] if (s, name) not in back) for name in names}

    operators: dict[str, Operator] = {}
    for name in cycles.search(inputs, names, graph.edges)[0]:
        # What closes a cycle is not there yet; its shape is looked at below.
        known = [(s, operators[s].gives) for s in sources[name] if s in operators]
        incoming = _one_shape(graph.nodes[name], known)
        if graph.nodes[name].kind == "Input":
            incoming = _input_shape(graph, name, settings, on_cycle)
        made = _operator(graph.nodes[name], incoming, settings, name in on_cycle)
        if prod(made.gives) > MAX_VALUES:
            raise BadGraph(
                f"{graph.nodes[name]}: it gives {listed(made.gives)}, {prod(made.gives):,} values "
                f"each step; at most {MAX_VALUES:,} are taken"
            )
        operators[name] = made
    for name in order:
        for source in sources[name]:
            if operators[source].gives != operators[name].takes:
                raise BadGraph(
                    f"{graph.nodes[name]}: it takes {listed(operators[name].takes)}, and "
                    f"{graph.nodes[source]} gives it {listed(operators[source].gives)}"
                )
    return Program(
        operators,
        tuple(order),
        now,
        late,
        inputs,
        graph.of_kind("Output"),
        settings.semantics.recurrent_bias == "first step",
    )


def _over_time(graph: Graph, settings: Settings) -> tuple[set[str], set[str]]:
    """The nodes whose output waits for no input, and all those that hold a value over time."""
    early, holding = set[str](), set[str]()
    for name, node in graph.nodes.items():
        if node.kind in NEURONS:
            holding.add(name)
            if settings.rule(Fields(node)).firing == "before":
                early.add(name)
        elif node.kind == "Delay" and (steps_of(Fields(node), settings) > 0).all():
            holding.add(name)
            early.add(name)
    return early, holding


def _one_shape(node: Node, known: list[tuple[str, Shape]]) -> Shape | None:
    """The shape that all of a node's sources give."""
    for source, shape in known:
        if shape != known[0][1]:
            raise BadGraph(
                f"{node}: its inputs are added up, and {known[0][0]!r} gives it "
                f"{listed(known[0][1])}, {source!r} {listed(shape)}"
            )
    return known[0][1] if known else None


def _input_shape(
    graph: Graph, name: str, settings: Settings, on_cycle: Mapping[str, int]
) -> Shape | None:
    """An Input's own shape, or the one that a node behind it takes by its parameters."""
    if own := Fields(graph.nodes[name]).shape("shape"):
        return own
    for source, target in graph.edges:
        if source == name:
            return _operator(graph.nodes[target], None, settings, target in on_cycle).takes
    return None


def _operator(node: Node, incoming: Shape | None, settings: Settings, recurrent: bool) -> Operator:
    fields = Fields(node)
    if node.kind == "Affine":
        bias = not (recurrent and settings.semantics.recurrent_bias == "never")
        return make_linear(fields, incoming, bias)
    if node.kind in LAYERS:
        return LAYERS[node.kind](fields, incoming)
    if node.kind in NEURONS:
        return make_neuron(fields, incoming, settings, recurrent)
    if node.kind == "Delay":
        return make_delay(fields, incoming, settings)
    assert node.kind in ("Input", "Output", PORT), node.kind  # noqa: S101 - `graph_of` knows no other
    shape = expect(fields, incoming, fields.shape("shape"))
    return Operator(shape, shape)
