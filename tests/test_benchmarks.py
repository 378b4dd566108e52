"""The benchmarks are instruments: these tests check what they say, never how fast anything is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.__main__ import main
from benchmarks.backlog import Backlog
from benchmarks.bound import WireBound
from benchmarks.compare import word
from benchmarks.gpu import main as gpu_main
from benchmarks.load import drive, in_turn, schedule
from benchmarks.measure import Figure, Run, Spread, dearer, faster
from benchmarks.processes import Process
from benchmarks.report import Report
from benchmarks.targets import TARGETS
from click.testing import CliRunner

from conftest import wait_until

REPLY = (b"an output", b"0123456789ab")


def figure(key: str = "engine.1024.1", values: tuple[float, ...] = (1.0, 2.0, 3.0)) -> Figure:
    return Figure(key, "a round", "the bare step", Spread.of(values))


@pytest.fixture
def backlog(redis_url: str) -> Iterator[Backlog]:
    frames = np.random.default_rng(0).normal(size=(3, 2, 4)).astype(np.float32)
    made = Backlog(redis_url, "bench", ["s0", "s1", "s2", "s3", "s4"], frames)
    yield made
    made.close()


def test_things_are_measured_in_turn_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []

    def thing(name: str, seconds: list[float]) -> float:
        calls.append(name)
        return seconds[calls.count(name) - 1]

    run = Run(quick=True, repeats=3)
    times = run.alternate(
        "", {"a": lambda: thing("a", [99, 1, 2, 3]), "b": lambda: thing("b", [99, 2, 8, 3])}
    )
    assert "".join(calls) == "abababab"
    ours = faster(times, "a", "b", key="k", a="", b="")
    # The median of ratios within a repetition, not the ratio of medians.
    assert ours.value == Spread(2.0, 1.5, 3.0, 3)
    assert (ours.a_value, ours.b_value) == (2e6, 3e6)
    assert dearer(times, "a", "b", key="k", a="", b="").value.median == 0.5


def test_a_report_comes_back_from_its_json_as_it_was(tmp_path: Path) -> None:
    placed = replace(figure(), note="noisy", a_value=1.5, of="us a frame").at("engine", "all", 1024)
    report = Report([placed, figure("other")], {"server": "no sparx"}, {"cores": 2}, quick=True)
    report.save(tmp_path / "a.json")
    assert Report.load(tmp_path / "a.json") == report
    stored = json.loads((tmp_path / "a.json").read_text())["figures"]
    assert stored[0]["target"]["limit"] == TARGETS["engine.1024.1"].limit
    assert stored[0]["met"] is True
    assert "target" not in stored[1]


def test_a_change_counts_only_where_the_quartiles_are_apart() -> None:
    assert word(figure(), figure(values=(2.0, 3.0, 4.0))) == "within"
    assert word(figure(), figure(values=(5.0, 6.0, 7.0))) == "better"
    assert word(figure(values=(5.0, 6.0, 7.0)), figure()) == "worse"
    cost = replace(figure(), better="less")
    assert word(cost, replace(figure(values=(5.0, 6.0, 7.0)), better="less")) == "worse"


def test_two_runs_are_compared_by_one_command(tmp_path: Path) -> None:
    Report([figure(), figure("gone")]).save(tmp_path / "old.json")
    Report([figure(values=(5.0, 6.0, 7.0))]).save(tmp_path / "new.json")
    paths = [str(tmp_path / "old.json"), str(tmp_path / "new.json")]
    result = CliRunner().invoke(main, ["compare", *paths])
    assert result.exit_code == 0, result.output
    assert "+200.0 %" in result.output
    assert "better" in result.output
    assert "1 figures are in one of the two only" in result.output


def test_a_run_prints_a_table_and_writes_json_and_a_picture(tmp_path: Path) -> None:
    paths = ["--json", str(tmp_path / "b.json"), "--png", str(tmp_path / "b.png")]
    result = CliRunner().invoke(main, ["--quick", "--repeats", "2", "--only", "occupancy", *paths])
    assert result.exit_code == 0, result.output
    assert "round of 16 of 1,024 sessions" in result.output
    (found,) = Report.load(tmp_path / "b.json").figures
    assert found.value.count == 2
    assert 0 < found.value.low <= found.value.median <= found.value.high


def test_the_picture_shows_what_was_placed_in_it(tmp_path: Path) -> None:
    from benchmarks.plot import draw

    assert not draw(Report([figure()]), tmp_path / "none.png")
    placed = [figure(f"engine.{n}.1").at("engine", "all", n) for n in (1, 64)]
    assert draw(Report(placed), tmp_path / "some.png")
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("depth", "batch"), [(16, 0), (16, 2), (1, 5), (3, 1)])
def test_the_wire_bound_answers_every_frame_once_and_advances_done(
    backlog: Backlog, depth: int, batch: int
) -> None:
    bound = WireBound(backlog, REPLY, depth=depth, batch=batch)
    for _ in range(2):
        total = backlog.fill(20)
        assert bound.run(total) == total
    ask, keys = backlog.connection.call, backlog.keys
    for name in backlog.sessions:
        frames = [id_ for id_, _ in ask("XRANGE", keys.inbox(name), "-", "+")]
        replies = ask("XRANGE", keys.outbox(name), "-", "+")
        assert [id_ for id_, _ in replies] == frames == [b"%d-0" % k for k in range(1, 41)]
        assert replies[0][1] == [b"output", REPLY[0], b"weights", REPLY[1]]
        assert ask("HGET", keys.row(name), "done") == b"40-0"


def test_the_wire_bound_writes_nothing_of_a_session_that_is_another_owners(
    backlog: Backlog,
) -> None:
    bound = WireBound(backlog, REPLY)
    backlog.connection.call("HSET", backlog.keys.row("s3"), "epoch", "2")
    total = backlog.fill(4)
    assert bound.run(total) == total - 4
    assert backlog.connection.call("EXISTS", backlog.keys.outbox("s3")) == 0


def test_a_schedule_holds_its_rate_for_every_session() -> None:
    due, who = schedule(sessions=10, rate_hz=200.0, seconds=3.0, seed=1)
    assert len(due) == pytest.approx(600, abs=10)
    assert (np.diff(due) >= 0).all()
    for session in range(10):
        np.testing.assert_allclose(np.diff(due[who == session]), 0.05)


@pytest.mark.parametrize("sessions", [1, 5])
def test_the_driver_counts_a_frame_from_when_it_was_due(
    redis_url: str, backlog: Backlog, sessions: int
) -> None:
    with Process("benchmarks.echo", redis_url, "in", "{bench:0}:out:echo"):
        wait_until(lambda: backlog.connection.call("EXISTS", "{bench:0}:out:echo"), 20, "an echo")
        # A second stream that never answers: with it, replies are heard of, not waited for.
        outboxes = ["{bench:0}:out:echo", "{bench:0}:out:silent"][: 1 if sessions == 1 else 2]
        heard = drive(
            *(redis_url, ["in"], outboxes, backlog.raw),
            rate_hz=200.0,
            seconds=0.5,
            warm_s=0.1,
            first_id=7,
            sessions=sessions,
        )
        assert heard.answered == 1.0
        assert (heard.latency_ms > heard.late_ms).all()
        assert len(heard.latency_ms) == pytest.approx(80, abs=6)
    # Nobody answers any more: a frame without a reply took for ever.
    silent = drive(
        *(redis_url, ["in"], outboxes, backlog.raw),
        rate_hz=100.0,
        seconds=0.1,
        warm_s=0.0,
        first_id=1000,
        grace_s=0.1,
    )
    assert silent.answered == 0.0
    assert np.isinf(silent.latency_ms).all()


def test_live_sessions_send_their_next_frame_when_the_last_is_answered(
    redis_url: str, backlog: Backlog
) -> None:
    with Process("benchmarks.echo", redis_url, "in", "{bench:0}:out:echo"):
        wait_until(lambda: backlog.connection.call("EXISTS", "{bench:0}:out:echo"), 20, "an echo")
        outboxes = ["{bench:0}:out:echo", "{bench:0}:out:silent"]
        # Three sessions that share an echo's streams, fifty frames each.
        seconds = in_turn(redis_url, ["in"] * 3, outboxes, backlog.raw, turns=50, first_id=11)
        assert 0 < seconds < 1
        replies = backlog.connection.call("XRANGE", "{bench:0}:out:echo", "11", "+")
        assert [id_ for id_, _ in replies] == [b"%d-0" % n for n in range(11, 161)]
        with pytest.raises(RuntimeError, match="equal or smaller"):
            in_turn(redis_url, ["in"], outboxes, backlog.raw, turns=1, first_id=11)


def test_the_gpu_script_refuses_a_machine_without_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(gpu_main, ["--json", str(tmp_path / "gpu.json")])
    assert result.exit_code == 2
    assert "JAX sees no GPU" in result.output
    assert not (tmp_path / "gpu.json").exists()
