"""Random graphs of every primitive, written, read and run, against an interpreter by the book."""

from __future__ import annotations

import nir
import numpy as np
import pytest

from nir_data import model, run
from nir_graphs import DT, random_graph
from nir_oracle import Oracle, flatten

SEEDS = 14
STEPS = 12
RESETS = ("value", "zero", "subtract")


def inputs_of(shapes, seed):
    rng = np.random.default_rng(1000 + seed)
    return {
        name: (rng.random((STEPS, 2, *shape)) < 0.5) * rng.normal(1, 1, (STEPS, 2, *shape))
        for name, shape in sorted(shapes.items())
    }


def compare(path, seed):
    """A random graph through a file; returns how many recurrent edges it had."""
    graph, shapes = random_graph(seed)
    nir.write(path, graph)
    options = {"reset": RESETS[seed % 3], "discretise": ("euler", "exact")[seed % 2]}
    oracle = Oracle(nir.read(path, type_check=False), DT, **options)
    inputs = inputs_of(shapes, seed)
    expected = oracle.run(inputs)
    served = model(path, dt=DT, **options)
    x = next(iter(inputs.values()))
    if len(inputs) > 1:
        x = np.concatenate([one.reshape(STEPS, 2, -1) for one in inputs.values()], axis=2)
    assert served.sample_shape == x.shape[2:]
    out, _ = run(served, x, frame=4)
    out = out if isinstance(out, dict) else {next(iter(expected)): out}
    assert out.keys() == expected.keys()
    for name, want in expected.items():
        scale = max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(out[name], want, rtol=0, atol=1e-11 * scale, err_msg=name)
    return len(oracle.recurrent)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_graph_is_what_the_book_says(x64, tmp_path, monkeypatch, seed):
    # That it streams is compared here, frame by frame; the check at its making costs more.
    monkeypatch.setattr("slotstream_worker.engine.building.check_streams", lambda _: None)
    compare(tmp_path / "graph.nir", seed)


def test_the_random_graphs_have_everything():
    kinds, cycles, several = set(), 0, 0
    for seed in range(SEEDS):
        graph, shapes = random_graph(seed)
        kinds |= {type(node).__name__ for node in flatten(graph)[0].values()}
        kinds |= {type(node).__name__ for node in graph.nodes.values()}
        cycles += bool(Oracle(graph, DT).recurrent)
        several += len(shapes) > 1
    names = "Affine AvgPool2d Conv1d Conv2d CubaLI CubaLIF Delay Flatten I IF Input LI LIF Linear"
    assert kinds == {*names.split(), "NIRGraph", "Output", "Scale", "SumPool2d", "Threshold"}
    assert cycles >= 5
    assert several >= 2
