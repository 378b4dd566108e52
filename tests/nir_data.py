"""The published graphs, what frameworks compute for them, and running a model on arrays."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import jax
import nir
import numpy as np
import pytest

import slotstream_worker.nir as served

ROOT = Path(__file__).parent.parent


def shared(name):
    """A file of the shared data; the test is skipped, with the reason, where there is none."""
    folders = [ROOT.parent / "shared", Path(os.environ.get("SLOTSTREAM_SHARED", "/nonexistent"))]
    for folder in folders:
        if (path := folder / "data" / "nir" / name).exists():
            return path
    pytest.skip(f"there is no {name} in ../shared/data/nir (or $SLOTSTREAM_SHARED/data/nir)")
    raise AssertionError  # skip has raised


def run(model, x, frame=None):
    """Outputs of a stream `[T, B, ...]` and the state after it, in frames of `frame` steps."""
    step = jax.jit(model.apply)
    state, parts = None, []
    for start in range(0, len(x), frame or len(x)):
        out, state = step(model.variables, state, x[start : start + (frame or len(x))])
        parts.append(jax.tree.map(np.asarray, out))
    return jax.tree.map(lambda *a: np.concatenate(a), *parts), jax.tree.map(np.asarray, state)


def model(graph, dtype="float64", frame=4, **options):
    return served.nir(graph, dtype=dtype, frame=frame, **options)


def chain(*nodes, shape=None):
    """Input, the nodes in a row, Output; named by kind and place."""
    shape = nodes[0].input_type["input"] if shape is None else shape
    named = {"in": nir.Input({"input": np.array(shape)})}
    named |= {f"{type(n).__name__}{k}": n for k, n in enumerate(nodes)}
    named["out"] = nir.Output({"output": None})
    names = list(named)
    return graph(named, list(pairwise(names)))


def graph(nodes, edges):
    return nir.NIRGraph(dict(nodes), list(edges), type_check=False)


def array(*values):
    return np.array(values, float)
