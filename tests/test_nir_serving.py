"""A NIR graph behind the stream server, the worker and the command line."""

from __future__ import annotations

import re

import nir
import numpy as np
import pytest
from click.testing import CliRunner, Result

from nir_data import model, run, shared
from slotstream_worker import StreamServer
from slotstream_worker.cli import check, worker
from slotstream_worker.loading import SCHEMES, BadTarget, TargetOptions, load

LIF = nir.LIF(
    tau=np.array([0.01, 0.02]),
    r=np.array([2.0, 3.0]),
    v_leak=np.array([0.1, 0.0]),
    v_threshold=np.array([0.4, 0.5]),
)


@pytest.fixture
def path(tmp_path):
    """A recurrent layer of two neurons behind a weight matrix."""
    nodes = {
        "in": nir.Input({"input": np.array([3])}),
        "fc": nir.Affine(weight=np.eye(2, 3) * 4, bias=np.array([0.1, 0.2])),
        "lif": LIF,
        "w_rec": nir.Affine(weight=np.array([[0.0, -1.0], [0.5, 0.0]]), bias=np.array([0.1, 0.0])),
        "out": nir.Output({"output": np.array([2])}),
    }
    edges = [("in", "fc"), ("fc", "lif"), ("lif", "w_rec"), ("w_rec", "lif"), ("lif", "out")]
    nir.write(tmp_path / "net.nir", nir.NIRGraph(nodes, edges))
    return tmp_path / "net.nir"


def asked(*arguments: str, command=check, **env: str) -> Result:
    result = CliRunner().invoke(command, arguments, env={"COLUMNS": "200", **env})
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def words(result: Result) -> str:
    return re.sub(r"\s+", " ", result.output)


def test_interleaved_sessions_are_their_own_streams():
    held = np.load(shared("braille_noDelay_bias_zero__norse-zero.npz"))
    x = held["input"].astype("float32")[:96]
    served = model(
        shared("braille_noDelay_bias_zero.nir"), "float32", 8, dt=1e-4, semantics="norse"
    )
    server = StreamServer(served, slots=8, row_counts=(4,))
    sessions = [server.open() for _ in range(8)]
    rng = np.random.default_rng(1)
    todo = [k for k in range(8) for _ in range(12)]
    rng.shuffle(todo)
    begun, futures = [0] * 8, [[] for _ in range(8)]
    for step, k in enumerate(todo):
        frame = x[8 * begun[k] : 8 * begun[k] + 8, k]
        futures[k].append(server.submit(sessions[k], frame))
        begun[k] += 1
        if step % 5 == 0:
            server.step()
    server.run()
    for k in range(8):
        stream = np.concatenate([future.result() for future in futures[k]])
        alone, _ = run(served, x[:, [k] * 4], frame=8)
        assert stream.tobytes() == np.ascontiguousarray(alone[:, 0]).tobytes()
        np.testing.assert_array_equal(stream, held["output"][:96, k])


@pytest.mark.crash
def test_a_worker_that_dies_goes_on_with_the_spikes_of_the_framework(worker_process, client):
    held = np.load(shared("braille_noDelay_noBias_subtract__norse-subtract.npz"))
    options = ("--dt", "1e-4", "--semantics", "norse", "--reset", "subtract", "--frame", "32")
    target = f"nir:{shared('braille_noDelay_noBias_subtract.nir')}"
    options += ("--dtype", "float64", "--name", "touch", "--checkpoint-interval", "0.2")
    first = worker_process(*options, model=target).wait_ready()
    x = held["input"].astype("float64")
    sessions = [client.open() for _ in range(4)]
    for k, session in enumerate(sessions):
        session.push_many([x[t : t + 32, k] for t in range(0, 128, 32)])
    outputs = [[] for _ in sessions]
    for session, got in zip(sessions, outputs, strict=True):
        for reply in session.replies(timeout_s=60):
            got.append(reply.output)
            if len(got) == 4:
                break
    first.kill()
    worker_process(*options, model=target, log="second.log").wait_ready()
    for k, (session, got) in enumerate(zip(sessions, outputs, strict=True)):
        session.push_many([x[t : t + 32, k] for t in range(128, 256, 32)])
        session.end()
        got += [r.output for r in session.replies(timeout_s=60) if r.output is not None]
        stream = np.concatenate(got)
        assert stream.dtype == np.float64
        np.testing.assert_array_equal(stream, held["output"][:, k])


def test_check_shows_what_a_graph_takes_gives_and_holds(path):
    result = asked(
        f"nir:{path}", "--dt", "1e-3", "--frame", "6", "--slots", "4", "--row-counts", "4"
    )
    said = words(result)
    assert result.exit_code == 0
    assert "net.nir (nir, value reset, euler, dt 0.001)" in said
    assert "float32 [6, 3]" in said
    assert "float32 [6, 2]" in said
    assert "state ['nodes']['lif']['v']" in said
    assert "state ['recurrent']['w_rec']" in said


def test_options_come_from_the_environment_too(path):
    env = {"SLOTSTREAM_DT": "1e-3", "SLOTSTREAM_SEMANTICS": "norse", "SLOTSTREAM_RESET": "value"}
    said = words(asked(f"nir:{path}", **env))
    assert "no: the semantics of norse reset by zero or subtract, and 'value' was asked for" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nir:",), "no: a model is nir:FILE; got 'nir:'"),
        (("nir:nowhere.nir",), "no: there is no file 'nowhere.nir'"),
        (("nir:{path}",), "no: node 'lif' (LIF): how far it moves in a step"),
        (("nir:{path}", "--dt", "0.1"), "forward Euler grows without bound where dt=0.1"),
        (("nir:{path}", "--dt", "1", "--semantics", "sinabs"), "verified for IF and not for LIF"),
        (("slotstream_worker.demo.serving:model", "--dt", "1"), "takes no options of its own"),
        (("neural",), "or nir:FILE, sparx:RUN; got 'neural'"),
    ],
)
def test_a_no_says_why(path, arguments, message):
    result = asked(*(a.format(path=path) for a in arguments))
    assert result.exit_code == 1
    assert message in words(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dt", "0"), "0 is not in the range x>0"),
        (("--dt", "fast"), "'fast' is not a valid float"),
        (("--semantics", "lava"), "'lava' is not one of 'nir', 'norse'"),
        (("--frame", "0"), "0 is not in the range x>=1"),
    ],
)
@pytest.mark.parametrize("command", [check, worker])
def test_an_option_that_means_nothing(command, arguments, message):
    target = ("nir:a.nir",) if command is check else ("--model", "nir:a.nir")
    result = asked(*target, *arguments, command=command)
    assert result.exit_code == 2
    assert message in words(result)


def test_a_worker_says_what_is_wrong_with_a_file_and_leaves(path, caplog, monkeypatch):
    monkeypatch.setattr("slotstream_worker.service.install_signals", lambda _: None)
    path.write_bytes(path.read_bytes()[:4000])
    result = asked("--model", f"nir:{path}", "--dt", "1e-3", command=worker)
    assert result.exit_code == 1
    assert "cannot be opened as HDF5" in caplog.text
    assert "Traceback" not in caplog.text + result.output


def test_every_option_is_of_a_scheme_and_explained():
    taken = frozenset().union(*(scheme.takes for scheme in SCHEMES.values()))
    of_any_target = {"variables"}
    assert taken | of_any_target == frozenset(TargetOptions.__dataclass_fields__)
    for command in (check, worker):
        helps = {param.name: getattr(param, "help", None) for param in command.params}
        assert all(helps[name] for name in taken)


def test_a_module_takes_no_options():
    with pytest.raises(BadTarget, match="--dt, --frame was given; leave it out"):
        load("serving_models:served", TargetOptions(dt=1.0, frame=3))
