"""`slotstream bench`: what it counts, what it measures from, and how it leaves."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from conftest import ThreadedWorker, wait_until
from mishaps import pass_time
from serving_models import served
from slotstream import BadFrame, Client, codec
from slotstream.bench.display import Display
from slotstream.bench.histogram import PRECISION, Histogram
from slotstream.bench.ledger import Account, Ledger
from slotstream.bench.load import Load
from slotstream.bench.outcome import Outcome
from slotstream.bench.plan import Plan
from slotstream.bench.samples import Samples, at_random, from_file
from slotstream.cli import cli, main
from slotstream.embedded import EmbeddedRedis
from slotstream.names import Keys
from slotstream_worker import models
from test_client import Proxy
from test_wire import Gate

_numbers = itertools.count(1)
KEYS = Keys("slotstream")


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="module")
def gate(server: EmbeddedRedis) -> Iterator[Gate]:
    worker = ThreadedWorker(server.url, served(), slots=64, checkpoint_interval_s=0.2)
    gate = Gate(worker)
    worker.start()
    yield gate
    worker.drain()


@pytest.fixture
def client(server: EmbeddedRedis, gate: Gate) -> Iterator[Client]:
    with Client(server.url, patience_s=10.0) as client:
        yield client
    assert gate.worker.thread.is_alive(), f"the worker has ended: {gate.worker.error}"


@pytest.fixture
def run(server: EmbeddedRedis, gate: Gate, tmp_path: Path) -> Callable[..., Any]:
    """Run `slotstream bench`; its result, with the figures it wrote as `figures`."""

    def bench(*options: object, url: str = server.url, app: str = "slotstream") -> Any:
        file = tmp_path / f"figures-{next(_numbers)}.json"
        words = ["bench", "--redis", url, "--app", app, "--json", file, *options]
        result = CliRunner().invoke(cli, [str(word) for word in words])
        result.figures = json.loads(file.read_text()) if file.exists() else None
        return result

    return bench


def opened(client: Client) -> set[str]:
    """Sessions that are open now."""
    return {raw.decode() for raw in client.redis.smembers(KEYS.sessions)}


def once_pushing(client: Client, act: Callable[[], None]) -> threading.Thread:
    """Do something in a thread, once a load pushes."""

    def run() -> None:
        wait_until(lambda: list(client.redis.scan_iter("*:in:bench-*")), 20, "frames are pushed")
        act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


# The accounts


def ids(*numbers: int) -> list[bytes]:
    return [b"%d-1" % number for number in numbers]


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def account(ledger: Ledger) -> Account:
    """Five frames pushed at 10 s, due a second apart from 6 s on."""
    account = Account(ledger)
    account.push(ids(8, 9, 10, 11, 12), [6.0, 7.0, 8.0, 9.0, 10.0], 10.0)
    return account


def test_replies_in_order_leave_nothing_lost_or_twice(ledger, account):
    for k, id_ in enumerate(ids(8, 9, 10, 11, 12)):
        account.reply(id_, 11.0 + k)
    account.ask_end(b"13-1")
    account.reply(b"13-1", 17.0)
    account.end("end")
    account.close()
    assert (ledger.pushed, ledger.replies, ledger.lost, ledger.duplicated) == (5, 5, 0, 0)
    assert ledger.awaited == 0
    assert not ledger.ended_early
    ledger.flush()
    assert ledger.from_due.percentile(0) == ledger.from_due.percentile(100) == 5.0
    assert ledger.from_push.max_s == 5.0
    assert ledger.from_push.percentile(1) == pytest.approx(1.0, rel=PRECISION)


def test_a_frame_whose_reply_is_skipped_is_lost(ledger, account):
    account.reply(b"8-1", 11.0)
    account.reply(b"11-1", 11.0)  # as numbers: as text, 8-1 would follow it
    assert (ledger.replies, ledger.lost, ledger.duplicated, ledger.awaited) == (2, 2, 0, 1)
    account.close()
    assert (ledger.lost, ledger.awaited, account.awaited) == (3, 0, 0)


@pytest.mark.parametrize("again", [b"8-1", b"9-1", b"10-2", b"7-1"])
def test_a_reply_that_no_frame_waits_for_is_one_too_many(ledger, account, again):
    for id_ in ids(8, 9, 10):
        account.reply(id_, 11.0)
    account.reply(again, 12.0)
    account.reply(b"11-1", 12.0)
    account.reply(b"12-1", 12.0)
    assert (ledger.replies, ledger.lost, ledger.duplicated) == (5, 0, 1)


def test_replies_that_have_changed_places_are_lost_and_too_many(ledger, account):
    for id_ in ids(8, 10, 9, 11, 12):
        account.reply(id_, 11.0)
    assert (ledger.replies, ledger.lost, ledger.duplicated) == (4, 1, 1)


def test_what_a_session_owes_when_it_ends_is_lost(ledger, account):
    account.reply(b"8-1", 11.0)
    account.reply(b"9-1", 11.0, "launch_failed")
    account.end("quarantined")
    assert account.ended
    assert (ledger.replies, ledger.lost) == (2, 3)
    assert dict(ledger.ended_early) == {"quarantined": 1}
    assert dict(ledger.errors) == {"launch_failed": 1}


def test_a_gap_counts_only_while_a_reply_is_awaited(ledger, account):
    other = Account(ledger)
    ledger.heard(12.5)
    for id_ in ids(8, 9, 10, 11, 12):
        account.reply(id_, 12.5)
    assert ledger.longest_gap_s == 2.5
    other.push(ids(1), [100.0], 100.0)  # silence before is nobody's
    ledger.heard(101.0)
    other.reply(b"1-1", 101.0)
    assert ledger.longest_gap_s == 2.5


def test_the_percentiles_are_within_the_precision_that_is_said():
    rng = np.random.default_rng(5)
    values = np.exp(rng.normal(-4, 2, 100_000))
    histogram = Histogram()
    for value in values:
        histogram.add(float(value))
    histogram.flush()
    assert histogram.count == len(values)
    ordered = np.sort(values)
    for percent in (0.1, 1, 50, 90, 99, 99.9, 99.99):
        exact = ordered[int(np.ceil(percent / 100 * len(values))) - 1]
        assert histogram.percentile(percent) == pytest.approx(exact, rel=PRECISION)
    assert histogram.percentile(100) == histogram.max_s == values.max()
    assert histogram._counts.nbytes < 20_000


def test_a_histogram_takes_any_duration():
    histogram = Histogram()
    assert np.isnan(histogram.percentile(50))
    for value in (0.0, -1e-9, 1e-9, 5.0, 1e6):
        histogram.add(value)
    histogram.flush()
    assert histogram.count == 5
    assert histogram.percentile(80) == pytest.approx(5.0, rel=PRECISION)
    assert histogram.max_s == 1e6


# What is pushed


def config_of(dtype: str, frame: int = 4, sample: tuple[int, ...] = (6,)) -> dict[str, str]:
    return {"dtype": dtype, "frame": str(frame), "sample_shape": json.dumps(sample)}


@pytest.mark.parametrize("dtype", codec.DTYPES)
def test_random_frames_are_varied_and_of_the_apps_dtype(dtype):
    config = config_of(dtype)
    samples = at_random(config, seed=1)
    frames = samples.take(3, 50)
    arrays = np.stack([codec.decode(frames.encoding(k)) for k in range(50)])
    assert arrays.dtype.name == dtype
    assert arrays.shape == (50, 4, 6)
    assert len({array.tobytes() for array in arrays}) > 40
    if np.dtype(arrays.dtype).kind in "iu":
        assert np.abs(arrays.astype(float)).max() <= 128
    elif dtype != "bool":
        assert np.isfinite(arrays.astype(np.complex128)).all()
    again, other = at_random(config, seed=1), at_random(config, seed=2)
    assert again.take(3, 50).datas == frames.datas != other.take(3, 50).datas


def test_frames_are_taken_round_and_round():
    array = np.arange(5 * 2, dtype=np.float32).reshape(5, 1, 2)
    samples = Samples(codec.FrameCodec("float32", (1, 2)), array)
    frames = samples.take(13, 12)
    got = [codec.decode(frames.encoding(k)) for k in range(12)]
    np.testing.assert_array_equal(np.stack(got), array[[k % 5 for k in range(13, 25)]])


def test_a_file_of_frames_or_time_steps_is_pushed_in_the_apps_dtype(tmp_path):
    array = np.random.default_rng(3).normal(size=(7, 4, 6))
    for name, saved in (("frames", array), ("steps", array.reshape(28, 6))):
        np.save(tmp_path / f"{name}.npy", saved)
        frames = from_file(tmp_path / f"{name}.npy", config_of("bfloat16")).take(0, 7)
        got = np.stack([codec.decode(frames.encoding(k)) for k in range(7)])
        np.testing.assert_array_equal(got, array.astype(ml_dtypes.bfloat16))
    np.save(tmp_path / "odd.npy", np.ones((3, 4, 5), np.float32))
    with pytest.raises(BadFrame, match=r"\[4, 6\].*\[4, 5\]"):
        from_file(tmp_path / "odd.npy", config_of("float32"))


# A load


def test_a_load_at_a_rate_pushes_what_is_due_and_hears_of_all_of_it(run, client):
    before = opened(client)
    result = run("--sessions", 6, "--rate", 20, "--duration", 1.5)
    assert result.exit_code == 0, result.output
    figures = result.figures
    assert figures["ok"] is True
    assert figures["pushed"] == figures["replies"] == 6 * 30
    assert (figures["lost"], figures["duplicated"], figures["errors"]) == (0, 0, {})
    assert figures["asked_hz"] == 120
    assert figures["behind"] == 0
    assert 1.4 < figures["pushing_s"] < 10
    for kind in ("latency_from_due_ms", "latency_from_push_ms"):
        found = figures[kind]
        assert 0 < found["p50"] <= found["p90"] <= found["p99"] <= found["p99.9"] <= found["max"]
    assert figures["latency_from_push_ms"]["p50"] <= figures["latency_from_due_ms"]["p50"]
    for words in ("frames pushed", "180", "from when it was due", "p99.9", "counts from when"):
        assert words in result.output
    # It leaves no session open, and no replies that would fill the memory for an hour.
    assert opened(client) == before
    assert not list(client.redis.scan_iter("*:out:bench-*"))
    assert not list(client.redis.scan_iter("*:in:bench-*"))


def test_without_a_rate_the_windows_are_kept_full(run, client):
    result = run("--sessions", 4, "--duration", 1, "--window", 5)
    assert result.exit_code == 0, result.output
    figures = result.figures
    assert figures["pushed"] == figures["replies"] > 100
    assert figures["latency_from_due_ms"] is None
    assert figures["answered_hz"] > 50
    assert "No rate was set" in result.output
    assert "from when it was due" not in result.output


def test_a_load_goes_round_in_the_frames_of_a_file(run, client, tmp_path):
    np.save(tmp_path / "frames.npy", np.random.default_rng(0).normal(size=(12, 6)))
    result = run("--frames", tmp_path / "frames.npy", "--sessions", 2, "--duration", 0.5)
    assert result.exit_code == 0, result.output
    assert result.figures["replies"] > 12


def test_an_app_of_whole_numbers_is_given_such(run, server):
    def step(_: Any, carry: Any, frames: Any) -> Any:
        total = carry[None] + jnp.cumsum(frames, axis=0)
        return total[-1], total

    model = models.carry(step, jnp.zeros((1, 3), jnp.int32), {}, frame=4, sample_shape=(3,),
                         dtype=np.int32)  # fmt: skip
    worker = ThreadedWorker(server.url, model, app="whole").start()
    result = run("--sessions", 2, "--duration", 0.5, app="whole")
    worker.drain()
    assert result.exit_code == 0, result.output
    assert result.figures["errors"] == {}
    assert result.figures["replies"] > 10


def test_a_latency_counts_from_when_the_frame_was_due(client, gate):
    # The worker stands still for 0.8 s of 2 s. With a window of 1, each session has one frame in
    # flight meanwhile: counted from their pushes, a few frames were late; in truth, all were that
    # should have been pushed in that time.
    client.window = 1
    thread = threading.Thread(target=stand_still, args=(gate, 0.8), daemon=True)
    begin = one_time(thread.start)
    plan = Plan(sessions=2, rate_hz=25, duration_s=2.0, window=1)
    load = Load(client, plan, at_random(client.config(), 0), look=lambda: hold())  # noqa: PLW0108

    def hold() -> None:
        if load.ledger.replies >= 10:
            begin()

    load.run()
    thread.join(10)
    ledger = load.ledger
    assert (ledger.replies + load.behind, ledger.lost) == (100, 0)
    assert ledger.longest_gap_s > 0.75
    assert ledger.from_push.percentile(90) < 0.4
    assert ledger.from_due.percentile(75) > 0.1
    assert ledger.from_due.percentile(90) > 0.4
    assert ledger.from_due.max_s > 0.75


def one_time(act: Callable[[], None]) -> Callable[[], None]:
    done: list[bool] = []

    def once() -> None:
        if not done:
            done.append(True)
            act()

    return once


def stand_still(gate: Gate, seconds: float) -> None:
    with gate.held():
        pass_time(seconds)


def test_frames_that_found_no_room_in_time_are_behind_and_said_so(run, client, gate):
    thread = once_pushing(client, lambda: stand_still(gate, 2.0))
    result = run("--sessions", 3, "--rate", 40, "--duration", 1.5, "--window", 2)
    thread.join()
    figures = result.figures
    assert result.exit_code == 0, result.output  # late is not lost
    assert figures["behind"] > 20
    assert figures["pushed"] + figures["behind"] == 3 * 60
    assert figures["replies"] == figures["pushed"]
    assert "more than the deployment serves" in result.output
    assert f"{figures['behind']:,} frames were due" in result.output


def test_a_frame_that_goes_missing_is_found_lost_and_ends_with_status_1(run, client, gate):
    # Deleted before the worker has read it, which nobody but the load notices.
    def take_one() -> None:
        with gate.held():
            inbox = next(client.redis.scan_iter("*:in:bench-*"))
            last = client.redis.xinfo_stream(inbox)["last-generated-id"].decode()
            entries = wait_until(lambda: client.redis.xrange(inbox, f"({last}")[2:], 10, "entries")
            assert client.redis.xdel(inbox, entries[0][0]) == 1

    thread = once_pushing(client, take_one)
    result = run("--sessions", 2, "--rate", 50, "--duration", 2)
    thread.join()
    assert result.exit_code == 1, result.output
    assert result.figures["lost"] == 1
    assert result.figures["duplicated"] == 0
    assert result.figures["ok"] is False


def test_replies_that_somebody_else_writes_are_too_many(client, gate):
    # As a worker would that answers twice: under an id that no frame has.
    def forge() -> None:
        with gate.held():
            outbox = next(client.redis.scan_iter("*:out:bench-*"))
            client.redis.xadd(outbox, {"output": codec.encode(np.zeros(2))}, id="*")

    once = one_time(forge)

    def write() -> None:
        if load.ledger.replies > 5:
            once()

    plan = Plan(sessions=1, rate_hz=20, duration_s=1.0, wait_s=1.0)
    load = Load(client, plan, at_random(client.config(), 0), look=write)
    load.run()
    assert load.ledger.duplicated >= 1
    assert not Outcome("slotstream", load, 0.0).ok


def test_cut_connections_lose_nothing(run, server, gate):
    with Proxy(server.port) as proxy:
        words = iter(["XREAD", "in:bench", "in:bench", "XREAD"])
        cut = threading.Event()

        def cut_now_and_then() -> None:
            for word in words:
                cut.wait(0.4)
                proxy.cut(word)

        thread = threading.Thread(target=cut_now_and_then, daemon=True)
        thread.start()
        result = run("--sessions", 4, "--rate", 30, "--duration", 2.5, url=proxy.url)
        thread.join(10)
        assert proxy.cuts == 4
    assert result.exit_code == 0, result.output
    assert result.figures["replies"] == result.figures["pushed"] == 4 * 75
    assert result.figures["duplicated"] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_it_sooner_and_still_reports_and_closes(run, client, gate, number):
    before = opened(client)
    handler = signal.getsignal(number)

    def press() -> None:
        pass_time(0.7)
        os.kill(os.getpid(), number)

    thread = once_pushing(client, press)
    started = time.monotonic()
    result = run("--sessions", 3, "--rate", 20, "--duration", 60)
    thread.join()
    assert time.monotonic() - started < 20
    assert result.exit_code == 0, result.output
    assert result.figures["interrupted"] is True
    assert result.figures["replies"] == result.figures["pushed"] > 10
    assert "stopped before its time" in result.output
    assert opened(client) == before
    assert signal.getsignal(number) == handler


def test_a_second_ctrl_c_ends_the_waiting_and_what_is_missing_is_lost(run, client, gate):
    def press() -> None:
        with gate.held():
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                pass_time(0.3)  # as a person presses twice

    thread = once_pushing(client, press)
    result = run("--sessions", 2, "--rate", 50, "--duration", 60)
    thread.join()
    assert result.exit_code == 1, result.output
    assert result.figures["lost"] > 0
    wait_until(lambda: not {s for s in opened(client) if s.startswith("bench-")}, 10, "closed")


# What is not there


def refused(capsys: Any, *words: object) -> str:
    """The one line that a run which cannot begin ends with."""
    with pytest.raises(SystemExit) as done:
        main(["bench", *map(str, words)])
    assert done.value.code == 1
    error: str = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    return error


def test_an_app_that_nobody_has_served_is_named(server, capsys):
    error = refused(capsys, "--redis", server.url, "--app", "unheard-of")
    assert "no worker of app unheard-of has run" in error
    assert "--app" in error


def test_an_app_whose_workers_are_gone_is_named(server, client, capsys):
    client.redis.hset("gone:config", mapping={**client.config()})
    error = refused(capsys, "--redis", server.url, "--app", "gone")
    assert "no worker of app gone is alive" in error


def test_sessions_without_room_are_an_error_and_are_closed(server, client, capsys):
    worker = ThreadedWorker(server.url, served(), app="small", slots=4, max_sessions=2).start()
    where = ("--redis", server.url, "--app", "small")
    error = refused(capsys, *where, "--sessions", 5, "--wait", 1)
    assert "3 of 5 sessions found no worker with room in 1 s" in error
    keys = Keys("small")
    wait_until(lambda: not client.redis.smembers(keys.sessions), 10, "all are closed")
    assert not client.redis.exists(keys.waiting)
    worker.drain()


def test_a_redis_that_is_not_there_is_one_line(capsys):
    assert "127.0.0.1" in refused(capsys, "--redis", "redis://127.0.0.1:1/0")


@pytest.mark.parametrize(
    "options",
    [("--sessions", 0), ("--rate", -1), ("--duration", 0), ("--window", 0), ("--wait", 0)],
    ids=lambda pair: pair[0],
)
def test_a_load_that_is_none_is_refused(run, options):
    result = run(*options)
    assert result.exit_code == 2
    assert "got" in result.output


# What is shown


def test_a_terminal_shows_how_far_it_is(client, gate):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    load = Load(client, Plan(2, 25.0, 1.2), at_random(client.config(), 0))
    with Display(console, load) as display:
        load.run()
        console.print(display.table())
    shown = out.getvalue()
    for words in ("pushed", "replies", "p50", "p99", "lost 0", "━", "in flight"):
        assert words in shown


def test_a_pipe_is_shown_the_figures_only(client):
    out = io.StringIO()
    load = Load(client, Plan(1, 20.0, 0.3), at_random(client.config(), 0))
    with Display(Console(file=out, width=100), load):
        load.run()
    assert out.getvalue() == ""
