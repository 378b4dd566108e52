"""Files and graphs that cannot be served: each says which node, what is wrong, what to do."""

from __future__ import annotations

import re
import tracemalloc

import h5py
import nir
import numpy as np
import pytest
from click.testing import CliRunner

from nir_data import array, chain, graph, model, run
from slotstream_worker.cli import check
from slotstream_worker.engine.errors import CannotStream
from slotstream_worker.nir import BadGraph, hdf5
from slotstream_worker.nir.graph import graph_of


def lif(n=3, **fields):
    given = {"tau": 0.01, "r": 1.0, "v_leak": 0.0, "v_threshold": 0.5} | fields
    return nir.LIF(**{k: np.full(n, v) if np.ndim(v) == 0 else v for k, v in given.items()})


def dense(out, into):
    return nir.Linear(weight=np.ones((out, into)))


def recurrent():
    """Two layers, the first recurrent."""
    nodes = {
        "in": nir.Input({"input": np.array([2])}),
        "fc": nir.Affine(weight=np.ones((3, 2)), bias=np.zeros(3)),
        "lif": lif(),
        "w_rec": dense(3, 3),
        "out": nir.Output({"output": np.array([3])}),
    }
    edges = [("in", "fc"), ("fc", "lif"), ("lif", "w_rec"), ("w_rec", "lif"), ("lif", "out")]
    return graph(nodes, edges)


@pytest.fixture
def path(tmp_path):
    target = tmp_path / "trained.nir"
    nir.write(target, recurrent())
    return target


def refusal(given, **options):
    with pytest.raises(BadGraph) as caught:
        model(given, "float32", **({"dt": 1e-3} | options))
    return re.sub(r"\s+", " ", str(caught.value))


def change(path, key, **field):
    """Replace a dataset of the file, or take it out."""
    with h5py.File(path, "r+") as file:
        del file[key]
        if field:
            file.create_dataset(key, **field)


def test_the_file_itself_is_fine(path):
    out, _ = run(model(path, "float32", dt=1e-3), np.ones((8, 2, 2), "float32"))
    assert out.sum() > 0


def test_no_file(tmp_path):
    assert "there is no file" in refusal(tmp_path / "nope.nir")
    assert "there is no file" in refusal(tmp_path)
    assert "File name too long" in refusal(tmp_path / ("n" * 300))


def test_no_hdf5(tmp_path):
    text = tmp_path / "text.nir"
    text.write_text("nodes: []\n")
    assert "cannot be opened as HDF5" in refusal(text)


def test_hdf5_that_is_no_graph(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["weights"] = np.zeros(3)
    assert "no group 'node', it has ['weights']" in refusal(tmp_path / "other.h5")


@pytest.mark.parametrize("part", [0.02, 0.3, 0.7, 0.99])
def test_a_truncated_file(path, part):
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    assert "cannot be opened as HDF5" in refusal(path)
    result = CliRunner().invoke(check, [f"nir:{path}", "--dt", "1e-3"])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.output.startswith("no: ")


def test_flipped_bytes_are_refused_or_make_no_difference_to_reading(path):
    whole = path.read_bytes()
    # libhdf5 itself does not come back from some damage to a heap of strings; it is left alone.
    heaps = [found.start() for found in re.finditer(b"GCOL", whole)]
    assert heaps
    sound = [k for k in range(len(whole)) if not any(h <= k < h + 4096 for h in heaps)]
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for place in rng.choice(sound, 8):
            damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(damaged))
        try:
            graph_of(hdf5.read(path))
        except BadGraph:
            refused += 1
    assert 20 < refused < 150


@pytest.mark.parametrize(
    ("key", "field", "message"),
    [
        ("fc/type", {"data": "Dense"}, "node 'fc' is of type 'Dense', which is no primitive"),
        ("fc/type", {"data": 3}, "node 'fc' has no 'type'"),
        ("fc/type", {}, "node 'fc' has no 'type'"),
        ("fc", {"data": 1.0}, "node 'fc' is a value"),
        ("fc/bias", {}, "node 'fc' (Affine): it has no 'bias'; it has ['weight']"),
        ("fc/bias", {"data": np.ones(4)}, "'bias' has shape [4] and its 'weight' [3, 2]"),
        ("fc/weight", {"data": np.ones(3)}, "'weight' has shape [3]; [..., out, in] is needed"),
        ("fc/weight", {"data": np.ones((3, 5))}, "it takes [5], and what leads to it gives [2]"),
        ("fc/weight", {"data": np.ones((4, 2))}, "its 'bias' has shape [3]"),
        ("fc/weight", {"data": array([1, np.nan], [0, 1], [1, 1])}, "the first nan at [0, 1]"),
        ("fc/weight", {"data": "heavy"}, "its 'weight' is 'heavy', and numbers are needed"),
        ("fc/weight", {"data": np.ones((3, 2), complex)}, "of real numbers"),
        ("fc/weight", {"data": h5py.Empty("f4")}, "node 'fc', field 'weight' is empty"),
        ("fc/weight", {"data": np.full((3, 2), 1e39)}, "as large as 1e+39, beyond float32"),
        ("lif/tau", {"data": array(0.1, -0.2, 0.1)}, "'tau' is at least -0.2, and every value"),
        ("lif/tau", {"data": np.zeros(3)}, "must be above 0"),
        ("lif/tau", {"data": np.full(3, 1e-4)}, "grows without bound where dt=0.001"),
        (
            "lif/tau",
            {"data": np.full(4, 0.1)},
            "its parameters have different shapes: r [3], tau [4]",
        ),
        ("lif/r", {"data": np.full(3, np.inf)}, "its 'r' [3] holds 3 values that are not finite"),
        ("lif/v_threshold", {"data": np.full(3, -np.inf)}, "the first -inf at [0]"),
        ("w_rec/weight", {"data": np.ones((2, 3))}, "node 'w_rec' (Linear) gives it [2]"),
        ("out/shape", {"data": [5]}, "node 'out' (Output): it takes [5]"),
        ("in/shape", {"data": [0]}, "a shape is of whole numbers above 0"),
        ("in/shape", {"data": [1e9]}, "values each step; at most"),
    ],
)
def test_a_bad_field(path, key, field, message):
    change(path, f"node/nodes/{key}", **field)
    assert message in refusal(path)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([("in", "fcc"), ("lif", "out")], "names 'fcc', and there is no such node"),
        ([("in", "fc"), ("in", "fc"), ("lif", "out")], "('in', 'fc') is there more than once"),
        ([("in", "fc"), ("fc", "in"), ("lif", "out")], "node 'in' (Input) has an edge into it"),
        ([("out", "fc"), ("lif", "out")], "node 'out' (Output) has an edge out of it"),
        ([("in", "fc"), ("fc", "lif")], "node 'out' (Output) has no edge into it"),
        (
            [("in", "fc"), ("in", "lif"), ("fc", "lif"), ("lif", "out")],
            "node 'lif' (LIF): its inputs are added up, and 'fc' gives it [3], 'in' [2]",
        ),
    ],
)
def test_bad_edges(path, edges, message):
    change(path, "node/edges", data=np.array(edges, dtype=object), dtype=h5py.string_dtype())
    assert message in refusal(path)


def test_edges_that_are_no_pairs(path):
    change(path, "node/edges", data=np.ones((2, 3)))
    assert "edges are pairs of names" in refusal(path)
    change(path, "node/edges")
    assert "the graph has no 'edges'" in refusal(path)


def test_ten_gigabytes_declared_are_refused_unread(path):
    key = "node/nodes/fc/weight"
    change(path, key, shape=(125_000, 10_000), dtype="f8", chunks=(1, 10_000), compression="gzip")
    assert path.stat().st_size < 200_000
    tracemalloc.start()
    said = refusal(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "node 'fc', field 'weight' declares shape [125000, 10000]" in said
    assert "10,000,000,000 bytes" in said
    assert "--max-model-bytes" in said
    assert peak < 20e6


def test_many_small_tensors_count_together(path):
    with h5py.File(path, "r+") as file:
        for k in range(9):
            file.create_dataset(f"node/nodes/fc/extra{k}", shape=(10**6,), dtype="f8")
    assert "over the limit of 70,000,000" in refusal(path, max_bytes=70_000_000)
    model(path, "float32", dt=1e-3, max_bytes=80_000_000)


def test_a_file_that_leads_elsewhere(path, tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["w"] = np.ones((3, 2))
    with h5py.File(path, "r+") as file:
        nodes = file["node/nodes"]
        del nodes["fc/weight"]
        nodes["fc/weight"] = h5py.ExternalLink("other.h5", "/w")
    assert "node 'fc', field 'weight' is a link to another place" in refusal(path)
    with h5py.File(path, "r+") as file:
        nodes = file["node/nodes"]
        del nodes["fc/weight"]
        layout = h5py.VirtualLayout((3, 2), "f8")
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "w", (3, 2))
        nodes["fc"].create_virtual_dataset("weight", layout)
    assert "keeps its data in another file" in refusal(path)
    with h5py.File(path, "r+") as file:
        del file["node/nodes/fc/weight"]
        file["node/nodes/fc/again"] = file["node"]
    assert "nested without end" in refusal(path)


def test_a_cycle_without_a_neuron_is_an_algebraic_loop():
    nodes = {
        "in": nir.Input({"input": np.array([3])}),
        "a": dense(3, 3),
        "b": nir.Scale(scale=np.full(3, 0.5)),
        "gate": nir.Threshold(threshold=np.zeros(3)),
        "out": nir.Output({"output": np.array([3])}),
    }
    edges = [("in", "a"), ("a", "b"), ("b", "gate"), ("gate", "a"), ("gate", "out")]
    said = refusal(graph(nodes, edges))
    assert "the cycle through 'a', 'b', 'gate' holds no neuron, integrator or delay" in said
    for steps, runs in ((0.0, False), (0.4, False), (1.0, True)):
        nodes["late"] = nir.Delay(delay=np.full(3, steps * 1e-3))
        waited = [*edges[:3], ("gate", "late"), ("late", "a"), ("gate", "out")]
        if runs:
            model(graph(nodes, waited), "float32", dt=1e-3)
        else:
            assert "'late'" in refusal(graph(nodes, waited))


def test_a_loop_beside_a_neuron_is_found_too():
    nodes = dict(recurrent().nodes)
    nodes["twist"] = dense(3, 3)
    edges = [*recurrent().edges, ("w_rec", "twist"), ("twist", "w_rec")]
    assert "the cycle through 'twist', 'w_rec'" in refusal(graph(nodes, edges))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([nir.Delay(delay=array(1.0, -1.0))], "'delay' is as low as -1"),
        ([nir.Delay(delay=array(1e9, 1.0))], "is dt in the unit of the delays?"),
        ([nir.Delay(delay=array(5e4, 1.0))], "it would hold 100,000,000 values"),
        ([nir.Flatten({"input": np.array([2])}, 1, -1)], "flattens axes 1 to -1 of an input [2]"),
        ([nir.IF(r=np.ones(2), v_threshold=array(1, np.nan))], "'v_threshold' [2] holds 1 values"),
    ],
)
def test_a_bad_node(nodes, message):
    assert message in refusal(chain(*nodes, shape=(2,)))


def conv(**fields):
    given = {
        "input_shape": None,
        "weight": np.ones((4, 2, 3, 3)),
        "stride": 1,
        "padding": 0,
        "dilation": 1,
        "groups": 1,
        "bias": np.zeros(4),
    }
    return nir.Conv2d(**(given | fields))


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (conv(groups=3), "4 channels in 3 groups"),
        (conv(groups=2), "in 2 groups takes [4, H, W], and what leads to it gives [2, 5, 5]"),
        (conv(weight=np.ones((4, 2, 7, 7))), "window of [7, 7] does not fit into"),
        (conv(weight=np.ones((4, 2, 3))), "of 4 axes is needed"),
        (conv(bias=np.zeros(3)), "'bias' has shape [3]; [4] is needed"),
        (conv(stride=0), "2 whole numbers of 1 or more"),
        (conv(stride=10**12), "2 whole numbers of 1 or more"),
        (conv(stride=2, padding="same"), "needs a stride of 1, not [2, 2]"),
        (conv(padding=(1.5, 1)), "whole numbers of 0 or more"),
        (conv(padding=10**9), "values each step; at most"),
        (conv(input_shape=(9, 9)), "it takes [2, 9, 9], and what leads to it gives [2, 5, 5]"),
        (nir.SumPool2d(array(6, 6), array(1, 1), array(0, 0)), "[6, 6] does not fit into"),
        (nir.AvgPool2d(array(2, 2, 2), array(1, 1), array(0, 0)), "2 whole numbers of 1"),
        (dense(3, 2), "it takes [2], and what leads to it gives [2, 5, 5]"),
    ],
)
def test_a_bad_window(node, message):
    assert message in refusal(chain(node, shape=(2, 5, 5)))


def test_a_graph_without_end_or_without_shape():
    cycle = graph({"a": lif(), "b": dense(3, 3)}, [("a", "b"), ("b", "a")])
    assert "the graph has no Output" in refusal(cycle)
    nodes = {"pool": nir.SumPool2d(array(2, 2), array(2, 2), array(0, 0))}
    assert "nothing says the shape of its input" in refusal(graph(nodes, []))


def test_a_frame_of_too_many_values():
    wide = graph(
        {"in": nir.Input({"input": np.array([10**7])}), "out": nir.Output({"output": None})},
        [("in", "out")],
    )
    assert "is 70,000,000 values; at most 67,108,864" in refusal(wide, frame=7)
    with pytest.raises(CannotStream, match="a frame is at least one time step"):
        model(recurrent(), "float32", 0, dt=1e-3)


def test_options_that_mean_nothing():
    assert "a time step is a number above 0" in refusal(recurrent(), dt=-1.0)
    assert "say it with --dt" in refusal(recurrent(), dt=None)
    assert "there are the semantics nir, norse" in refusal(recurrent(), semantics="lava")
    with pytest.raises(BadGraph, match="float32 or float64"):
        model(recurrent(), "int32")
    assert "got a dict" in refusal({"nodes": {}})
    with pytest.raises(CannotStream, match="jax_enable_x64"):
        model(recurrent(), "float64", dt=1e-3)
