"""A NIR graph as a `StreamModel`."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slotstream_worker.engine.building import build
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.engine.state import Tree
from slotstream_worker.nir import hdf5
from slotstream_worker.nir.errors import BadGraph
from slotstream_worker.nir.fields import Array, listed
from slotstream_worker.nir.graph import graph_of
from slotstream_worker.nir.operator import MAX_VALUES
from slotstream_worker.nir.program import compile_graph
from slotstream_worker.nir.settings import Settings

FRAME = 10
"""Time steps a frame, unless it is said."""


def nir(
    graph: Any,
    *,
    dt: float | None = None,
    semantics: str = "nir",
    reset: str | None = None,
    discretise: str | None = None,
    frame: int = FRAME,
    dtype: Any = "float32",
    max_bytes: int = hdf5.MAX_BYTES,
) -> StreamModel:
    """Serve a graph of the Neuromorphic Intermediate Representation.

    Frames are `[frame, *shape of the graph's Input]`; several inputs are flattened and joined in
    the order of their names. Outputs are `[frame, *shape]`, a mapping of names where the graph
    has several. Each time step runs by itself within the frame, so that a stream gives the same
    bits whatever frames it is cut into. `docs/nir.md` has every primitive's equations.

    Source: Pedersen et al., Neuromorphic intermediate representation, Nature Communications 15,
    8122 (2024).

    Args:
        graph: path of a `.nir` file, or a `nir.NIRGraph`.
        dt: length of a time step in the unit of the graph's time constants; needed where a
            node depends on it.
        semantics: `nir`, or the framework whose computation to follow: `norse`, `snntorch`,
            `spyx`, `sinabs`.
        reset: `value` (to each neuron's `v_reset`), `zero` or `subtract`; by default the first
            of these that the semantics have.
        discretise: `euler` or `exact`, the former by default.
        frame: time steps a frame.
        dtype: `float32` or `float64` (which needs `jax_enable_x64`): of frames, state and
            outputs.
        max_bytes: bytes of arrays that a file may declare.

    Raises:
        BadGraph: the graph cannot be served so; names the node and what is wrong.
        CannotStream: as for every model.
    """
    if np.dtype(dtype) not in (np.float32, np.float64):
        raise BadGraph(f"a graph runs in float32 or float64, got dtype={np.dtype(dtype)}")
    settings = Settings.choose(semantics, reset, discretise, dt)
    if isinstance(graph, (str, os.PathLike)):
        path = Path(graph)
        name, tree = path.name, hdf5.read(path, max_bytes)
    elif hasattr(graph, "to_dict"):
        name, tree = type(graph).__name__, hdf5.from_mapping(graph.to_dict())
    else:
        raise BadGraph(
            f"a graph is the path of a .nir file or a nir.NIRGraph, got a {type(graph).__name__}"
        )
    program = compile_graph(graph_of(tree), settings)
    if (values := frame * prod(program.sample_shape)) > MAX_VALUES:
        raise BadGraph(
            f"a frame of {frame} steps of {listed(program.sample_shape)} is {values:,} values; at "
            f"most {MAX_VALUES:,} are taken. Take fewer steps a frame (--frame)"
        )
    weights = {
        key: {field: _cast(key, field, value, dtype) for field, value in held.weights.items()}
        for key, held in program.operators.items()
        if held.weights
    }

    def apply(weights: Tree, state: Tree | None, frames: jax.Array) -> tuple[Any, Tree]:
        begun = program.rest(weights, frames.shape[1], frames.dtype) if state is None else state
        after, outputs = jax.lax.scan(lambda held, x: program.step(weights, held, x), begun, frames)
        return outputs, after

    variables = jax.tree.map(jnp.asarray, weights)
    return build(
        f"{name} ({settings.semantics.name}, {settings.reset} reset, {settings.discretise}"
        f"{'' if dt is None else f', dt {dt:g}'})",
        apply,
        variables,
        frame=frame,
        sample_shape=program.sample_shape,
        dtype=dtype,
    )


def _cast(node: str, field: str, value: Array, dtype: Any) -> Array:
    """A weight in the model's dtype, whole numbers as they are."""
    if value.dtype.kind != "f":
        return value
    with np.errstate(over="ignore"):
        cast = np.asarray(value, dtype)
    if (np.isinf(cast) & ~np.isinf(value)).any():
        raise BadGraph(
            f"node {node!r}: its {field} is as large as {np.abs(value).max():g}, beyond "
            f"{np.dtype(dtype)}; take --dtype float64, or scale it down"
        )
    return cast
