"""What a spike, a reset, a delay, a cycle and a bias do, on graphs small enough to do by hand."""

from __future__ import annotations

from itertools import pairwise

import nir
import numpy as np
import pytest

from nir_data import array, chain, graph, model, run
from slotstream_worker.nir import SEMANTICS, BadGraph

pytestmark = pytest.mark.usefixtures("x64")


def outputs(given, x, **options):
    """Outputs of a one-neuron graph, or of any, for inputs `[T, *shape]`."""
    x = np.asarray(x, float)
    x = x[:, None] if x.ndim > 1 else x[:, None, None]
    out, _ = run(model(given, **({"dt": 1.0} | options)), x)
    return {k: v[:, 0].squeeze() for k, v in out.items()} if isinstance(out, dict) else out[:, 0]


def counted(*args, **kwargs):
    return outputs(*args, **kwargs).ravel().tolist()


def fire(**fields):
    return nir.IF(r=array(1), **({"v_threshold": array(1)} | fields))


def test_the_threshold_is_strict():
    assert counted(chain(fire()), [1, 0, 2**-52, 0]) == [0, 0, 1, 0]
    assert counted(chain(nir.Threshold(threshold=array(1))), [1, 1 + 2**-52, -1]) == [0, 1, 0]


@pytest.mark.parametrize(
    ("reset", "expected"),
    # v_reset is 0.75: 0.75 + 0.5 fires at once; from 0: 0.5, 1.0, 1.5; left over: 1.5 - 1 = 0.5.
    [("value", [0, 0, 1, 1, 1, 1]), ("zero", [0, 0, 1, 0, 0, 1]), ("subtract", [0, 0, 1, 0, 1, 0])],
)
def test_what_a_spike_does_to_the_membrane(reset, expected):
    neuron = chain(fire(v_reset=array(0.75)))
    assert counted(neuron, [0.5] * 6, reset=reset) == expected
    if reset == "value":
        assert counted(neuron, [0.5] * 6) == expected  # the default


def test_an_integrate_and_fire_neuron_goes_by_the_time_step():
    neuron = chain(nir.IF(r=array(4), v_threshold=array(1)))
    assert counted(neuron, [1] * 8, dt=0.125) == [0, 0, 1] * 2 + [0, 0]
    assert counted(neuron, [1] * 4, dt=0.25, semantics="norse") == [0, 1, 0, 1]  # no r, no dt


def test_an_infinite_threshold_never_fires():
    neuron = chain(nir.IF(r=array(1), v_threshold=array(np.inf)))
    for reset in ("value", "zero", "subtract"):
        assert counted(neuron, [5, 5, -20, 5], reset=reset) == [0, 0, 0, 0]


@pytest.mark.parametrize("tau_syn", [0.5, 2.0, 2.0000001, 1e-4, 30.0])
def test_exact_steps_do_not_depend_on_their_length(tau_syn):
    """A constant input from rest: many short steps and one long one end at the same place."""
    cell = {"tau_mem": array(2.0), "r": array(3), "v_leak": array(0.5), "w_in": array(2)}
    neuron = chain(nir.CubaLI(tau_syn=array(tau_syn), **cell))
    fine = counted(neuron, [1.0] * 64, dt=0.125, discretise="exact")
    coarse = counted(neuron, [1.0] * 8, dt=1.0, discretise="exact")
    np.testing.assert_allclose(coarse, fine[7::8], rtol=1e-12)
    left, held = np.exp(-8 / 2.0), np.exp(-8 / tau_syn)
    late = (1 + 8 / 2.0) * left if tau_syn == 2.0 else (2 * left - tau_syn * held) / (2 - tau_syn)
    assert coarse[-1] == pytest.approx(0.5 * (1 - left) + 6 * (1 - late), rel=1e-6)


def test_exact_and_euler_agree_in_the_limit():
    neuron = chain(nir.LI(tau=array(0.5), r=array(2), v_leak=array(-1)))
    exact = counted(neuron, [1.0], dt=0.25, discretise="exact")
    assert exact[-1] == pytest.approx((-1 + 2) * (1 - np.exp(-0.5)), rel=1e-14)
    errors = [
        abs(counted(neuron, [1.0] * n, dt=0.25 / n, discretise="euler")[-1] - exact[-1])
        for n in (50, 100)
    ]
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.05)  # of first order


def test_a_stiff_membrane_takes_exact_steps():
    neuron = chain(
        nir.CubaLI(tau_syn=array(10.0), tau_mem=array(1e-6), r=array(1), v_leak=array(0))
    )
    v = counted(neuron, [1.0] * 3, discretise="exact")
    np.testing.assert_allclose(v, 1 - np.exp(-np.arange(1, 4) / 10), rtol=1e-6)
    with pytest.raises(BadGraph, match="grows without bound"):
        counted(neuron, [1.0])


def delays(*steps):
    return chain(nir.Delay(delay=array(*steps)), shape=(len(steps),))


def test_a_delay_of_each_element():
    x = np.arange(1, 7)[:, None] * [1, 10, 100]
    out = outputs(delays(0, 1, 3), x)
    assert out[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert out[:, 1].tolist() == [0, 10, 20, 30, 40, 50]
    assert out[:, 2].tolist() == [0, 0, 0, 100, 200, 300]
    halves = outputs(delays(0.5, 1.5, 2.6), x)  # to the nearest step, halves to even
    assert halves[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert halves[:, 1].tolist() == [0, 0, 10, 20, 30, 40]
    assert halves[:, 2].tolist() == [0, 0, 0, 100, 200, 300]


def loop(*back, rec=None):
    """An integrator that adds its own output of the past to its input, through `back`."""
    nodes = {
        "in": nir.Input({"input": np.array([1])}),
        "sum": rec or nir.I(r=array(1)),
        "out": nir.Output({"output": np.array([1])}),
    }
    names = [f"back{k}" for k in range(len(back))]
    nodes |= dict(zip(names, back, strict=True))
    way = ["sum", *names, "sum"]
    return graph(nodes, [("in", "sum"), ("sum", "out"), *pairwise(way)])


def test_a_recurrent_edge_is_one_step_old():
    once = nir.Linear(weight=array([1.0]).reshape(1, 1))
    # v(t) = v(t-1) + x(t) + v(t-1)
    assert counted(loop(once), [1, 0, 0, 0]) == [1, 2, 4, 8]
    assert counted(loop(), [1, 0, 0, 0]) == [1, 2, 4, 8]  # an edge to itself


def test_a_delay_in_a_cycle_is_as_long_as_it_says():
    late = nir.Delay(delay=array(1))
    assert counted(loop(late), [1, 0, 0, 0]) == [1, 2, 4, 8]
    later = nir.Delay(delay=array(2))
    # v(t) = v(t-1) + x(t) + v(t-2)
    assert counted(loop(later), [1, 0, 0, 0, 0]) == [1, 1, 2, 3, 5]


@pytest.mark.parametrize(("one", "other"), [("a", "b"), ("b", "a"), ("10", "9")])
def test_of_a_cycle_that_is_entered_twice_the_names_say_which_edge_is_old(one, other):
    nodes = {
        "in": nir.Input({"input": np.array([1])}),
        one: nir.I(r=array(1)),
        other: nir.I(r=array(10)),
        "out": nir.Output({"output": np.array([1])}),
    }
    edges = [("in", one), ("in", other), (one, other), (other, one), (other, "out")]
    first = outputs(graph(nodes, edges), [1, 0]).ravel().tolist()
    assert first == outputs(graph(nodes, edges[::-1]), [1, 0]).ravel().tolist()
    if one < other:  # one(1) = 1, other(1) = 10 (1 + 1); one(2) = 1 + 20, other(2) = 20 + 210
        assert first == [20, 230]
    else:  # other(1) = 10, one(1) = 1 + 10; other(2) = 10 + 110
        assert first == [10, 120]


def biased(weight, bias):
    return nir.Affine(weight=np.full((1, 1), float(weight)), bias=array(bias))


def test_when_a_recurrent_bias_acts():
    assert counted(loop(biased(0, 1)), [0, 0, 0]) == [1, 2, 3]  # from the first step
    # A chain of maps on the way back: 2 * (0 + 1) + 0.5 before the first step.
    chained = loop(biased(0, 1), biased(2, 0.5))
    assert counted(chained, [0, 0]) == [2.5, 5.0]
    lif = nir.CubaLIF(
        tau_syn=array(1), tau_mem=array(1), r=array(1), v_leak=array(0), v_threshold=array(0.5)
    )
    x = [0, 0, 0, 0]
    ways = {
        name: counted(loop(biased(0, 1), rec=lif), x, semantics=name)
        for name in ("nir", "norse", "snntorch", "spyx")
    }
    assert ways["nir"] == [1, 1, 1, 1]
    assert ways["norse"] == [0, 1, 1, 1]  # no value of the step before the first
    assert ways["snntorch"] == [1, 0, 1, 0]  # zeroed a step late, after the update
    assert ways["spyx"] == [0, 0, 0, 0]  # the bias is dropped


def test_branches_add_up_and_several_outputs_have_names():
    nodes = {
        "x": nir.Input({"input": np.array([2])}),
        "a": nir.Scale(scale=array(2, 3)),
        "b": nir.Scale(scale=array(10, 10)),
        "both": nir.Output({"output": np.array([2])}),
        "only": nir.Output({"output": np.array([2])}),
    }
    edges = [("x", "a"), ("x", "b"), ("a", "both"), ("b", "both"), ("a", "only")]
    out = outputs(graph(nodes, edges), [[1, 1], [2, 0]])
    assert out["both"].tolist() == [[12, 13], [24, 0]]
    assert out["only"].tolist() == [[2, 3], [4, 0]]


def test_several_inputs_are_joined_by_name():
    nodes = {
        "right": nir.Input({"input": np.array([2])}),
        "left": nir.Input({"input": np.array([1, 2])}),
        "flat": nir.Flatten({"input": np.array([1, 2])}, 0, -1),
        "out": nir.Output({"output": np.array([2])}),
    }
    both = graph(nodes, [("left", "flat"), ("flat", "out"), ("right", "out")])
    assert model(both).sample_shape == (4,)
    assert outputs(both, [[1, 2, 30, 40]]).tolist() == [[31, 42]]


def inner():
    nodes = {
        "in": nir.Input({"input": np.array([1])}),
        "twice": nir.Scale(scale=array(2)),
        "out": nir.Output({"output": np.array([1])}),
    }
    return graph(nodes, [("in", "twice"), ("twice", "out")])


@pytest.mark.parametrize("way", ["sub", "sub.in", "sub.out"])
def test_a_nested_graph_by_itself_and_by_its_ports(way):
    nodes = {
        "x": nir.Input({"input": np.array([1])}),
        "sub": graph({**inner().nodes, "deep": inner()}, []),
        "y": nir.Output({"output": np.array([1])}),
    }
    nodes["sub"].edges = [("in", "deep"), ("deep", "twice"), ("twice", "out")]
    into, out = ("sub.in", "sub") if way == "sub.in" else ("sub", way)
    out = "sub" if out == "sub.in" else out
    assert counted(graph(nodes, [("x", into), (out, "y")]), [1, 2]) == [4, 8]


def test_a_single_node_is_a_graph_too(tmp_path):
    nir.write(tmp_path / "one.nir", nir.Scale(scale=array(3, 4)))
    assert outputs(tmp_path / "one.nir", [[1, 1]]).tolist() == [[3, 4]]


def test_scalar_parameters_are_those_of_every_neuron():
    fields = {"tau": 2.0, "r": 2.0, "v_leak": 0.0, "v_threshold": 0.9, "v_reset": 0.0}
    one = nir.LIF(**{k: np.array(v) for k, v in fields.items()})
    each = nir.LIF(**{k: np.full((2, 2), v) for k, v in fields.items()})
    x = np.random.default_rng(0).random((12, 2, 2)) * 2
    expected = outputs(chain(each, shape=(2, 2)), x)
    assert 0 < expected.sum() < expected.size
    assert (outputs(chain(one, shape=(2, 2)), x) == expected).all()


def test_sinabs_counts_several_spikes_and_stops_at_minus_the_threshold():
    neuron = chain(nir.IF(r=array(1), v_threshold=array(2)))
    # v: 2 (fires at the threshold), 5 -> 1, -9 -> -2, -2 + 4.5 -> 0.5
    assert counted(neuron, [2, 5, -10, 4.5], semantics="sinabs") == [1, 2, 0, 1]


def test_spyx_ignores_r_and_w_in_and_the_leak_voltage():
    taus = {"tau_syn": array(2), "tau_mem": array(4), "v_threshold": array(1)}
    plain = nir.CubaLIF(r=array(1), v_leak=array(0), **taus)
    other = nir.CubaLIF(r=array(7), v_leak=array(3), w_in=array(5), **taus)
    x = [0.75, 0, 0, 0, 0, 0]
    # i: .75 .375 .1875 ...; v: .75, .9375, .890625, .76..., so no spike; twice as much spikes.
    assert counted(chain(plain), x, semantics="spyx") == [0] * 6
    twice = [2 * value for value in x]
    # v: 1.5 | spike, .5: .375 + .75 = 1.125 | spike, .125: .09375 + .375 | ...
    expected = [0, 1, 1, 0, 0, 0]
    assert counted(chain(plain), twice, semantics="spyx") == expected
    assert counted(chain(other), twice, semantics="spyx") == expected
    assert counted(chain(other), twice) != expected


def test_snntorch_puts_the_gain_of_a_lif_in_its_threshold():
    fields = {"tau": array(4), "v_leak": array(0), "v_threshold": array(0.5)}
    x = np.random.default_rng(3).random(40)
    ours = counted(chain(nir.LIF(r=array(3), **fields)), x)
    assert counted(chain(nir.LIF(r=array(3), **fields)), x, semantics="snntorch") == ours
    assert 0 < sum(ours) < 40
    with pytest.raises(BadGraph, match="divides the threshold by r dt / tau"):
        counted(chain(nir.LIF(r=array(-3), **fields)), x, semantics="snntorch")


def test_semantics_take_only_what_they_were_verified_for():
    lif = {"r": array(1), "v_leak": array(0), "v_threshold": array(1)}
    cuba = nir.CubaLIF(tau_syn=array(2), tau_mem=array(2), **lif)
    nodes = {
        "I": nir.I(r=array(1)),
        "IF": fire(),
        "LI": nir.LI(tau=array(2), r=array(1), v_leak=array(0)),
        "LIF": nir.LIF(tau=array(2), **lif),
        "CubaLI": nir.CubaLI(tau_syn=array(2), tau_mem=array(2), r=array(1), v_leak=array(0)),
        "CubaLIF": cuba,
        "Delay": nir.Delay(delay=array(1)),
    }
    for name, semantics in SEMANTICS.items():
        for kind, node in nodes.items():
            if kind in semantics.rules:
                continue
            with pytest.raises(BadGraph, match=f"semantics of {name} have been verified for"):
                model(chain(node), dt=1.0, semantics=name)
    with pytest.raises(BadGraph, match=r"r dt / tau_mem is 0\.5 to 0\.5, and snntorch"):
        model(chain(cuba), dt=1.0, semantics="snntorch")
    cuba.r, cuba.w_in = array(2), array(3)
    with pytest.raises(BadGraph, match=r"w_in dt / tau_syn is 1\.5 to 1\.5, and snntorch"):
        model(chain(cuba), dt=1.0, semantics="snntorch")
    nodes["LIF"].v_leak = array(0.1)
    for name in ("norse", "snntorch"):
        with pytest.raises(BadGraph, match="its 'v_leak' is not 0"):
            model(chain(nodes["LIF"]), dt=1.0, semantics=name)
    nodes["LIF"].v_leak = array(0)
    with pytest.raises(BadGraph, match="it lies on a cycle"):
        model(loop(rec=nodes["LIF"]), dt=1.0, semantics="snntorch")
    with pytest.raises(BadGraph, match="reset by subtract, and 'zero' was asked for"):
        model(chain(cuba), dt=1.0, semantics="spyx", reset="zero")
    with pytest.raises(BadGraph, match="discretise by euler, and 'exact' was asked for"):
        model(chain(fire()), semantics="norse", discretise="exact")
