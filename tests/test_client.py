"""The Python client and the commands of a producer, on a worker that runs."""

from __future__ import annotations

import itertools
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import slotstream
from conftest import ThreadedWorker, streams_of, wait_until
from serving_models import direct, served
from slotstream import (
    BadFrame,
    BadName,
    Client,
    EntryId,
    ReplyTimeout,
    SessionClosed,
    SessionExists,
)
from slotstream.cli import cli, main
from slotstream.embedded import EmbeddedRedis
from test_wire import SHAPE, Gate, Wire

_numbers = itertools.count(1)

WITHOUT_JAX = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "flax", "ml_dtypes", "slotstream_worker"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
"""


@pytest.fixture(scope="module")
def model() -> Any:
    return served()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="module")
def url(server: EmbeddedRedis) -> str:
    return server.url


@pytest.fixture(scope="module")
def gate(url: str, model: Any) -> Iterator[Gate]:
    """The worker of app `slotstream`, slots for all that the tests leave open."""
    worker = ThreadedWorker(url, model, slots=64, checkpoint_interval_s=0.1)
    gate = Gate(worker)
    worker.start()
    yield gate
    worker.drain()


@pytest.fixture
def client(url: str, gate: Gate) -> Iterator[Client]:
    with Client(url, patience_s=10.0) as client:
        yield client
    assert gate.worker.thread.is_alive(), f"the worker has ended: {gate.worker.error}"


@pytest.fixture
def unserved(url: str) -> Iterator[Wire]:
    """Raw commands in an app that no worker serves."""
    wire = Wire(url, f"unserved-{next(_numbers)}")
    yield wire
    wire.redis.close()


@pytest.fixture
def nobody(url: str, unserved: Wire) -> Iterator[Client]:
    """A client of the app that no worker serves, with a window of 4."""
    with Client(url, unserved.app, window=4, patience_s=10.0) as client:
        yield client


@pytest.fixture(scope="module")
def raw(url: str) -> Iterator[Wire]:
    """Raw commands, to see what is in Redis."""
    wire = Wire(url, "slotstream")
    yield wire
    wire.redis.close()


@pytest.fixture(scope="module")
def streams() -> dict[str, Any]:
    return streams_of(4, 10, SHAPE, seed=23)


@pytest.fixture(scope="module")
def expected(url: str, gate: Gate, model: Any, streams: dict[str, Any]) -> dict[str, list[Any]]:
    """The outputs of each stream alone, as bits; they are those of the direct call."""
    found = {}
    with Client(url) as client:
        for name, stream in streams.items():
            replies = client.run({f"alone-{name}": stream})[f"alone-{name}"]
            found[name] = bits(replies)
            for key, whole in direct(model, stream.reshape(-1, 6)).items():
                got = np.concatenate([reply.output[key] for reply in replies])
                np.testing.assert_allclose(got, whole, rtol=1e-5, atol=1e-6)
                assert np.abs(whole.astype(float)).max() > 0.1
    return found


def bits(replies: Any) -> list[Any]:
    """Outputs that compare equal only where every bit is."""
    return [
        {
            name: (array.dtype.name, array.shape, array.tobytes())
            for name, array in reply.output.items()
        }
        for reply in replies
        if reply.output is not None
    ]


class Proxy:
    """Stands before Redis and, once for each `cut`, drops the connection in place of an answer."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.cuts = 0
        self._words: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._stop = threading.Event()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def cut(self, word: str) -> None:
        """Cut off the answer to the next command that holds `word`; it is carried out."""
        self._words.append(word.encode())

    def __enter__(self) -> Proxy:
        self._threads[0].start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(5)
        self._listener.close()
        assert not self._words, f"no command held {self._words}"

    def _accept(self) -> None:
        while not self._stop.is_set():
            if select.select([self._listener], [], [], 0.05)[0]:
                thread = threading.Thread(
                    target=self._pass, args=[self._listener.accept()[0]], daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _pass(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self.port)) as redis:
            while not self._stop.is_set():
                for side in select.select([client, redis], [], [], 0.05)[0]:
                    data = side.recv(2**20)
                    if not data:
                        return
                    if side is redis:
                        client.sendall(data)
                        continue
                    redis.sendall(data)
                    for word in self._words:
                        if word in data:
                            assert redis.recv(2**20)  # so it has been carried out
                            self._words.remove(word)
                            self.cuts += 1
                            return


@pytest.fixture
def proxy(server: EmbeddedRedis) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def cut_off(proxy: Proxy, gate: Gate) -> Iterator[Client]:
    """A client whose answers the proxy cuts off."""
    with Client(proxy.url, patience_s=10.0) as client:
        yield client


# Without JAX


def test_a_producer_works_without_jax(url, gate, streams, expected, tmp_path):
    np.save(tmp_path / "frames.npy", streams["s0"])
    program = (
        WITHOUT_JAX
        + """
import numpy as np, slotstream
with slotstream.Client(sys.argv[1]) as client:
    session = client.open()
    for frame in np.load(sys.argv[2]):
        session.push(frame)
    session.end()
    for reply in session.replies():
        if reply.output:
            print(*[a.tobytes().hex() for _, a in sorted(reply.output.items())])
assert not {"jax", "jaxlib", "flax", "slotstream_worker"} & set(sys.modules)
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", program, url, tmp_path / "frames.npy"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        " ".join(one[name][2].hex() for name in sorted(one)) for one in expected["s0"]
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--help"], 0, ["worker     Serve a model", "push ", "sessions "]),
        (["push", "--help"], 0, ["FILE", "--out"]),
        (["worker"], 1, ["pip install 'slotstream[worker]'"]),
    ],
    ids=["help", "help of push", "worker"],
)
def test_the_command_line_works_without_jax(arguments, status, words):
    program = WITHOUT_JAX + f"from slotstream.cli import main\nmain({arguments})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == status, done.stderr
    assert all(word in done.stdout + done.stderr for word in words)
    assert "Traceback" not in done.stderr


# A session


def test_pushed_frames_are_answered_in_order_up_to_the_end(client, gate, streams, expected):
    session = client.open()
    pushed = [session.push(frame) for frame in streams["s1"]]
    pushed.append(session.end())
    replies = list(session.replies())
    assert [reply.id for reply in replies] == pushed == sorted(pushed)
    assert bits(replies) == expected["s1"]
    assert [reply.end for reply in replies] == [False] * 10 + [True]
    assert (replies[-1].reason, replies[-1].cancelled, replies[-1].output) == ("end", 0, None)
    assert session.closed == replies[-1]
    assert session.in_flight == 0
    assert session.worker == gate.worker.worker.config.worker
    assert all(0 < reply.latency_s < 60 for reply in replies)
    assert {reply.weights for reply in replies[:-1]} == {gate.worker.worker.model.weights}
    assert list(session.replies()) == []


def test_an_end_rides_on_the_last_frame(client, streams, expected):
    session = client.open()
    for k, frame in enumerate(streams["s2"]):
        session.push(frame, end=k == 9)
    replies = list(session.replies())
    assert bits(replies) == expected["s2"]
    assert [reply.end for reply in replies] == [False] * 9 + [True]


def test_replies_stop_when_nothing_is_in_flight_and_go_on_after_a_push(client, streams, expected):
    session = client.open()
    got = []
    for start in (0, 1, 4):
        for frame in streams["s3"][start : {0: 1, 1: 4, 4: 10}[start]]:
            session.push(frame)
        got.append(list(session.replies()))
    assert [len(part) for part in got] == [1, 3, 6]
    assert bits(itertools.chain(*got)) == expected["s3"]


def test_a_session_that_has_ended_takes_no_frame(client, raw, streams):
    session = client.open()
    session.push(streams["s0"][0], end=True)
    list(session.replies())
    with pytest.raises(SessionClosed, match=rf"{session.id} has ended \(end\)"):
        session.push(streams["s0"][1])
    assert raw.waiting(session.id) == []


def test_a_close_counts_what_it_cancels(client, gate, streams, expected):
    session = client.open()
    session.push(streams["s0"][0])
    first = list(session.replies())
    with gate.held():
        pushed = [session.push(frame) for _ in range(4) for frame in streams["s0"]]
        session.close()
    replies = list(session.replies())
    assert replies[-1].end
    assert replies[-1].reason == "close"
    assert replies[-1].cancelled > 0
    assert len(replies) - 1 + replies[-1].cancelled == len(pushed)
    assert replies[-1].id > pushed[-1]
    assert bits(first) == expected["s0"][:1]


def test_a_cancelled_frame_has_no_reply_and_no_effect(client, gate, streams, expected):
    session = client.open()
    with gate.held():
        pushed = [session.push(frame) for frame in streams["s1"][:3]]
        extra = session.push(streams["s2"][0])
        pushed += [session.push(frame, end=k == 6) for k, frame in enumerate(streams["s1"][3:])]
        assert session.in_flight == 11
        assert session.cancel(extra) is True
        assert session.in_flight == 10
        assert session.cancel(extra) is False
    replies = list(session.replies())
    assert [reply.id for reply in replies] == pushed
    assert bits(replies) == expected["s1"]


def test_an_answered_frame_is_not_cancelled(client, raw, streams, expected):
    session = client.open()
    pushed = [session.push(frame) for frame in streams["s2"]]
    wait_until(lambda: len(raw.out(session.id)) == 11, 10, "all are answered")
    assert [session.cancel(entry) for entry in pushed] == [False] * 10
    assert bits(session.replies()) == expected["s2"]


def test_a_reset_begins_the_stream_anew(client, streams, expected):
    session = client.open()
    for frame in streams["s3"][:4]:
        session.push(frame)
    alone = session.reset()
    for frame in streams["s1"][:4]:
        session.push(frame)
    with_frame = session.reset(streams["s0"][0])
    for frame in streams["s0"][1:]:
        session.push(frame)
    replies = list(session.replies())
    assert len(replies) == 19
    assert bits(replies) == expected["s3"][:4] + expected["s1"][:4] + expected["s0"]
    assert {reply.id: reply.op for reply in replies if reply.op} == {
        alone: "reset",
        with_frame: "reset",
    }


def test_a_second_client_goes_on_with_a_session_by_attaching(url, client, streams, expected):
    session = client.open()
    pushed = [session.push(frame) for frame in streams["s0"][:4]]
    first = list(session.replies())
    with Client(url) as other:
        attached = other.attach(session.id, after=first[1].id)
        pushed += [attached.push(frame) for frame in streams["s0"][4:]]
        pushed.append(attached.end())
        replies = list(attached.replies())
        assert [reply.id for reply in replies] == pushed[2:]
        assert bits(replies) == expected["s0"][2:]
        assert bits(other.attach(session.id).replies()) == expected["s0"]
    assert pushed == sorted(pushed)


def test_two_clients_may_push_into_one_session(url, client, streams, expected):
    session = client.open()
    with Client(url) as other:
        attached = other.attach(session.id)
        pushed = [
            (attached if k % 3 else session).push(frame) for k, frame in enumerate(streams["s2"])
        ]
        session.end()
        assert pushed == sorted(set(pushed))
        assert bits(attached.replies()) == expected["s2"]
    assert bits(session.replies()) == expected["s2"]


def test_a_used_id_is_opened_again_at_rest(client, streams, expected):
    for name in ("s0", "s1", "s0"):
        session = client.open("used-again")
        for frame in streams[name]:
            session.push(frame)
        session.end()
        replies = list(session.replies())
        assert len(replies) == 11
        assert bits(replies) == expected[name]


def test_a_used_id_is_opened_at_rest_also_when_a_late_push_outlived_its_tombstone(
    client, raw, streams, expected
):
    # A push that is repeated after its answer was cut off may come when the session has closed.
    # It makes a new `in`, which does not expire; the row and the replies do.
    session = client.open("late")
    session.push(streams["s2"][0])
    session.end()
    list(session.replies())
    raw.push("late", streams["s3"][:1])
    raw.call("DEL", raw.key("slot", "late"), raw.key("out", "late"))
    session = client.open("late")
    pushed = [session.push(frame) for frame in streams["s0"]]
    session.end()
    replies = list(session.replies())
    assert [reply.id for reply in replies[:-1]] == pushed
    assert bits(replies) == expected["s0"]


def test_an_open_session_is_not_opened_again(client, raw, streams, expected):
    session = client.open("taken")
    for frame in streams["s1"][:5]:
        session.push(frame)
    list(session.replies())
    with pytest.raises(SessionExists, match=r"taken is open \(live\).*attach"):
        client.open("taken")
    with pytest.raises(SessionExists, match="taken"):
        client.run({"not-taken": streams["s0"], "taken": streams["s0"]})
    assert not raw.row("not-taken")
    for frame in streams["s1"][5:]:
        session.push(frame)
    session.end()
    assert bits(session.replies()) == expected["s1"][5:]


@pytest.mark.parametrize("name", ["", "a b", "a\n", "ä", "x" * 129, "a*"])
def test_an_id_that_keys_cannot_be_made_of_is_refused(client, name):
    for act in (client.open, client.attach, lambda n: client.run({n: []})):
        with pytest.raises(BadName, match="1 to 128 of"):
            act(name)


def test_replies_that_wait_are_all_read(url, model, gate, streams, expected):
    # An app of its own: it keeps 12 replies of a session.
    worker = ThreadedWorker(url, model, app="waits", reply_retention=12).start()
    waits = Wire(url, "waits")
    with Client(url, "waits", window=200) as client:
        session = client.open(replies="wait")
        for _ in range(4):
            session.reset()
            for frame in streams["s3"]:
                session.push(frame)
        session.end()
        wait_until(lambda: len(waits.out(session.id)) >= 12, 10, "`out` is full")
        replies = list(session.replies())
        assert len(replies) == 45
        assert bits(replies) == expected["s3"] * 4
        assert waits.out(session.id) == []
    waits.redis.close()
    worker.drain()


# The window


def test_a_full_window_holds_the_next_push_until_a_reply_comes(client, streams, expected):
    client.window = 3
    session = client.open()
    most = 0
    for _ in range(3):
        session.reset()
        for frame in streams["s0"]:
            session.push(frame)
            most = max(most, session.in_flight)
    assert most == 3
    replies = list(session.replies())  # also those read to make room
    assert len(replies) == 33
    assert bits(replies) == expected["s0"] * 3


def test_a_window_that_stays_full_is_a_timeout_and_nothing_is_pushed(nobody, unserved, streams):
    session = nobody.open()
    pushed = [session.push(frame) for frame in streams["s0"][:4]]
    with pytest.raises(ReplyTimeout, match=rf"{session.id}, 4 in flight.*worker"):
        session.push(streams["s0"][4], timeout_s=0.05)
    assert session.in_flight == 4
    assert unserved.waiting(session.id) == [str(entry) for entry in pushed]


def test_a_window_holds_at_least_one_entry(url):
    with pytest.raises(ValueError, match="at least 1 entry, got 0"):
        Client(url, window=0)


# Many sessions


def test_run_takes_generators_and_empty_streams(client, streams, expected):
    def frames(name: str) -> Iterator[Any]:
        yield from streams[name]

    heard: list[tuple[str, EntryId]] = []
    replies = client.run(
        {
            "run-s0": frames("s0"),
            "run-none": [],
            "run-s1": frames("s1"),
            "run-none-2": iter(()),
            "run-one": iter(streams["s2"][:1]),
        },
        on_reply=lambda name, reply: heard.append((name, reply.id)),
    )
    assert list(replies) == ["run-s0", "run-none", "run-s1", "run-none-2", "run-one"]
    assert bits(replies["run-s0"]) == expected["s0"]
    assert bits(replies["run-s1"]) == expected["s1"]
    assert bits(replies["run-one"]) == expected["s2"][:1]
    for name in ("run-none", "run-none-2"):
        [only] = replies[name]
        assert (only.end, only.reason, only.output, only.error) == (True, "end", None, None)
    for name, own in replies.items():
        assert [reply.end for reply in own] == [False] * (len(own) - 1) + [True]
        assert [entry for heard_of, entry in heard if heard_of == name] == [r.id for r in own]
    assert client.run({}) == {}


def test_run_draws_frames_no_further_than_the_window(client, streams, expected):
    client.window = 4
    drawn, answered, most = dict.fromkeys("abc", 0), dict.fromkeys("abc", 0), 0

    def frames(name: str) -> Iterator[Any]:
        nonlocal most
        for frame in streams["s3"]:
            drawn[name] += 1
            most = max(most, drawn[name] - answered[name])
            yield frame

    def heard(name: str, reply: Any) -> None:
        answered[name[-1]] += 1

    replies = client.run({f"window-{name}": frames(name) for name in "abc"}, on_reply=heard)
    assert all(bits(own) == expected["s3"] for own in replies.values())
    assert drawn == answered == dict.fromkeys("abc", 10)
    assert 1 < most <= 4 + 1  # one is looked at early, since the last frame carries the end


def test_run_takes_no_refused_push_for_a_success(client, raw, streams, expected):
    def frames() -> Iterator[Any]:
        raw.add("refused", f"{2**50}-0", "op", "reset")  # larger than all that run will number
        yield from streams["s1"]

    try:
        replies = client.run({"refused": frames()}, timeout_s=1.0)
    except ReplyTimeout as timeout:
        pytest.fail(f"frames that Redis refused were taken for pushed: {timeout}")
    except slotstream.SlotstreamError:
        return  # to say that it cannot go on is right too
    assert bits(replies["refused"]) == expected["s1"]


def test_run_keeps_to_the_rate(client, streams, expected):
    started_ms = time.time() * 1000
    replies = client.run({"slow-a": streams["s0"], "slow-b": streams["s1"]}, rate_hz=50.0)
    assert bits(replies["slow-a"]) == expected["s0"]
    assert bits(replies["slow-b"]) == expected["s1"]
    for own in replies.values():
        # The ids are the times of the pushes; a late one may be made up for, none is early.
        early = [k for k, reply in enumerate(own) if reply.id.ms < started_ms + 20 * k - 5]
        assert not early


def test_no_worker_is_a_timeout_that_says_what_to_look_at(nobody, streams):
    session = nobody.open()
    session.push(streams["s0"][0])
    with pytest.raises(ReplyTimeout) as timeout:
        list(session.replies(timeout_s=0.05))
    assert isinstance(timeout.value, TimeoutError)
    for word in ("no reply in 0.05 s", session.id, "1 in flight", "worker"):
        assert word in str(timeout.value)
    with pytest.raises(ReplyTimeout, match=r"2 sessions have not ended.*left-1.*worker"):
        nobody.run({"left-1": streams["s0"], "left-2": streams["s1"]}, timeout_s=0.05)


# Answers that were cut off


@pytest.mark.parametrize("held", [False, True], ids=["answered meanwhile", "still waiting"])
def test_a_push_whose_answer_was_cut_off_runs_once(cut_off, proxy, gate, streams, expected, held):
    session = cut_off.open()
    pushed = []

    def push() -> None:
        for frame in streams["s1"]:
            proxy.cut(f"in:{session.id}")
            pushed.append(session.push(frame))

    if held:
        with gate.held():
            push()
    else:
        push()
    assert proxy.cuts == 10
    session.end()
    replies = list(session.replies())
    assert bits(replies) == expected["s1"]
    assert [reply.id for reply in replies[:10]] == pushed


def test_an_open_whose_answer_was_cut_off_opens_once(cut_off, proxy, raw, streams, expected):
    proxy.cut("control")
    session = cut_off.open()
    assert proxy.cuts == 1
    for frame in streams["s2"]:
        session.push(frame)
    session.end()
    assert bits(session.replies()) == expected["s2"]
    assert raw.row(session.id)["status"] == b"closed"
    raw.settle()
    assert raw.row(session.id)["status"] == b"closed"


def test_replies_whose_reading_was_cut_off_are_read_once(cut_off, proxy, streams, expected):
    session = cut_off.open()
    got = []
    for frame in streams["s3"]:
        session.push(frame)
        proxy.cut("XREAD")
        got += list(session.replies())
    assert proxy.cuts == 10
    assert bits(got) == expected["s3"]


def test_a_close_whose_answer_was_cut_off_closes(cut_off, proxy, streams, expected):
    session = cut_off.open()
    session.push(streams["s0"][0])
    got = list(session.replies())
    proxy.cut("control")
    session.close()
    got += list(session.replies())
    assert proxy.cuts == 1
    assert bits(got) == expected["s0"][:1]
    assert got[-1].reason == "close"


def test_a_run_whose_answers_were_cut_off_runs_every_frame_once(cut_off, proxy, streams, expected):
    for word in ("in:cut-s0", "in:cut-s1", "XREAD", "control", "in:cut-s1"):
        proxy.cut(word)
    replies = cut_off.run({f"cut-{name}": stream for name, stream in streams.items()})
    assert proxy.cuts == 5
    for name in streams:
        assert bits(replies[f"cut-{name}"]) == expected[name]
        assert len(replies[f"cut-{name}"]) == 10


def test_a_cancel_whose_answer_was_cut_off_is_not_waited_for(
    cut_off, proxy, gate, streams, expected
):
    session = cut_off.open()
    with gate.held():
        pushed = [session.push(frame) for frame in streams["s0"][:5]]
        extra = session.push(streams["s3"][1])
        proxy.cut(f"slot:{session.id}")
        assert session.cancel(extra) is True
        assert proxy.cuts == 1
        assert session.in_flight == 5
    replies = list(session.replies(timeout_s=5.0))
    assert [reply.id for reply in replies] == pushed
    assert bits(replies) == expected["s0"][:5]


# Bad frames


@pytest.mark.parametrize(
    ("array", "code", "words"),
    [
        (np.ones((3, 6), np.float32), "shape", r"\[4, 6\].*\[3, 6\]"),
        (np.ones((1, 4, 6), np.float32), "shape", r"\[4, 6\].*\[1, 4, 6\]"),
        (np.float32(1.5), "shape", r"\[4, 6\].*\[\]"),
        (np.ones(SHAPE, np.complex64), "dtype", "float32.*complex64"),
        (np.full(SHAPE, "x"), "dtype", "float32"),
        (np.full(SHAPE, None), "dtype", "float32.*object"),
    ],
    ids=["shape", "rank", "a number", "complex", "text", "objects"],
)
def test_a_frame_the_app_cannot_take_is_refused_at_the_push(
    client, raw, streams, expected, array, code, words
):
    session = client.open()
    first = session.push(streams["s1"][0])
    for act in (session.push, session.reset):
        with pytest.raises(BadFrame, match=words) as refused:
            act(array)
        assert refused.value.code == code
    info = raw.redis.xinfo_stream(raw.key("in", session.id))
    assert info["last-generated-id"].decode() == str(first)
    assert session.in_flight == 1
    session.push(streams["s1"][1].astype(np.float64).astype(">f4"))  # another byte order is fine
    assert bits(session.replies()) == expected["s1"][:2]


def test_frames_are_refused_only_once_the_config_is_known(nobody, unserved, streams):
    session = nobody.open()
    session.push(np.ones((3, 2)))
    unserved.redis.hset(
        f"{unserved.app}:config",
        mapping={
            "protocol": "1",
            "partitions": "1",
            "frame": "4",
            "sample_shape": "[6]",
            "dtype": "float32",
            "max_frame_bytes": "4096",
        },
    )
    with pytest.raises(BadFrame):
        session.push(np.ones((3, 2)))
    session.push(streams["s0"][0])
    assert len(unserved.waiting(session.id)) == 2


def test_an_error_reply_is_read_like_another(client, raw, streams, expected):
    session = client.open()
    session.push(streams["s2"][0])
    bad = raw.add(session.id, "*", "frame", slotstream.encode(np.int8([1, 2])))
    session.push(streams["s2"][1])
    replies = list(session.replies())
    assert bits(replies) == expected["s2"][:2]
    assert str(replies[1].id) == bad
    assert replies[1].output is None
    assert replies[1].error.code == "dtype"
    assert "float32" in replies[1].error.message
    assert str(replies[1].error).startswith("dtype: ")


# The command line


@pytest.fixture
def run_cli(url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: object, app: str = "slotstream") -> Any:
        command, *rest = map(str, arguments)
        return CliRunner().invoke(cli, [command, *rest, "--redis", url, "--app", app])

    return run


@pytest.fixture
def file(tmp_path: Path, streams: dict[str, Any]) -> Path:
    np.save(tmp_path / "recording.npy", streams["s1"])
    return tmp_path / "recording.npy"


def saved(path: Path) -> list[Any]:
    """The saved outputs, as `bits` of single replies."""
    with np.load(path) as arrays:
        return [
            {
                name: (
                    array.dtype.name,
                    array[4 * k : 4 * k + 4].shape,
                    array[4 * k : 4 * k + 4].tobytes(),
                )
                for name, array in arrays.items()
            }
            for k in range(10)
        ]


def test_push_saves_the_outputs_of_an_array(run_cli, file, tmp_path, expected):
    out = tmp_path / "outputs.npz"
    done = run_cli("push", file, "--out", out, "--session", "of-frames")
    assert done.exit_code == 0, done.output
    assert saved(out) == expected["s1"]
    assert str(out) in done.output
    assert "10 outputs" in done.output


def test_push_cuts_time_steps_into_frames(run_cli, tmp_path, streams, expected):
    np.save(tmp_path / "steps.npy", streams["s2"].reshape(40, 6))
    done = run_cli("push", tmp_path / "steps.npy", "--out", tmp_path / "o.npz", "--frame", 4)
    assert done.exit_code == 0, done.output
    assert saved(tmp_path / "o.npz") == expected["s2"]
    done = run_cli("push", tmp_path / "steps.npy", "--out", tmp_path / "again.npz")
    assert done.exit_code == 0, done.output
    assert saved(tmp_path / "again.npz") == expected["s2"]


def test_push_prints_the_outputs_of_each_frame(run_cli, file, expected):
    done = run_cli("push", file, "--session", "printed")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    first = np.frombuffer(expected["s1"][0]["scores"][2], np.float32)
    for line in lines:
        assert "scores" in line
        assert "spikes" in line
    np.set_printoptions(legacy=False)
    assert f"{first[0]:.3f}"[:5] in lines[0]


def test_push_says_where_it_saved_the_outputs(run_cli, file, tmp_path, expected):
    out = tmp_path / "outputs"  # without an ending
    done = run_cli("push", file, "--out", out)
    assert done.exit_code == 0, done.output
    said = Path(done.output.split(" in ")[-1].strip())
    assert said.exists(), f"it says {said}, and there is {[p.name for p in tmp_path.iterdir()]}"
    assert saved(said) == expected["s1"]


def test_push_takes_a_random_id_by_default(run_cli, client, raw, file, expected, tmp_path):
    # So that two at once of one file, or a session called as the file is, are not in each
    # other's way.
    session = client.open("recording")
    wait_until(lambda: raw.row("recording"), 10, "the session is open")
    done = run_cli("push", file, "--out", tmp_path / "o.npz")
    session.close()
    assert done.exit_code == 0, done.exception
    assert saved(tmp_path / "o.npz") == expected["s1"]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.ones((7, 6), np.float32), "multiple of 4"),
        (np.ones((2, 4, 6, 1), np.float32), r"[2, 4, 6, 1]"),
        (np.ones((2, 4, 5), np.float32), "[4, 5]"),
    ],
    ids=["not a multiple", "an axis too many", "another sample"],
)
def test_push_refuses_an_array_the_app_cannot_take(url, gate, tmp_path, capsys, array, words):
    np.save(tmp_path / "odd.npy", array)
    with pytest.raises(SystemExit) as done:
        main(["push", str(tmp_path / "odd.npy"), "--redis", url, "--session", "odd"])
    assert done.value.code == 1
    assert words in capsys.readouterr().err


def test_push_without_a_worker_says_so(url, tmp_path, streams, capsys):
    np.save(tmp_path / "steps.npy", streams["s2"].reshape(40, 6))
    push = ["push", str(tmp_path / "steps.npy"), "--redis", url, "--app", "nobody"]
    with pytest.raises(SystemExit) as done:
        main(push)
    assert done.value.code == 1
    assert "no worker has run" in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        main([*push, "--frame", "4", "--timeout", "0.05"])
    assert done.value.code == 1
    assert "is a worker running" in capsys.readouterr().err


def test_sessions_shows_how_far_each_session_is(run_cli, client, raw, gate, streams):
    session, other = client.open("shown/1"), client.open("shown/2")
    pushed = [session.push(frame) for frame in streams["s0"][:3]]
    list(session.replies())
    wait_until(lambda: raw.row("shown/1")["cursor"].decode() == str(pushed[-1]), 10, "a checkpoint")
    with gate.held():
        for frame in streams["s0"][3:7]:
            session.push(frame)
        done = run_cli("sessions", "--json")
        table = run_cli("sessions")
        limited = run_cli("sessions", "--json", "--limit", 1)
    assert done.exit_code == table.exit_code == 0
    rows = {row["session"]: row for row in map(json.loads, done.output.splitlines())}
    shown = rows["shown/1"]
    assert (shown["status"], shown["owner"]) == ("live", gate.worker.worker.config.worker)
    assert shown["cursor"] == shown["done"] == str(pushed[-1])
    assert shown["behind"] == 4
    assert shown["state_bytes"] > 0
    assert (rows["shown/2"]["done"], rows["shown/2"]["behind"]) == ("0-0", 0)
    [line] = [line for line in table.output.splitlines() if "shown/1" in line]
    for cell in ("live", shown["owner"], shown["done"], " 4 "):
        assert cell in line
    assert len(limited.output.splitlines()) == 1
    session.close()
    other.close()
    list(session.replies())
    list(other.replies())
    left = run_cli("sessions", "--json").output
    assert "shown/" not in left


def test_sessions_can_be_read_on_a_narrow_terminal_and_in_a_pipe(
    run_cli, client, raw, streams, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    session = client.open("narrow-1")
    session.push(streams["s0"][0])
    wait_until(lambda: raw.row("narrow-1").get("cursor", b"0-0") != b"0-0", 10, "a checkpoint")
    output = run_cli("sessions").output
    session.close()
    list(session.replies())
    assert [line for line in output.splitlines() if "narrow-1" in line and "live" in line], output


def test_sessions_of_an_app_without_any_is_empty(run_cli):
    assert run_cli("sessions", "--json", app="nothing-here").output == ""
    assert "0 sessions of nothing-here" in run_cli("sessions", app="nothing-here").output


def test_a_redis_that_is_not_there_is_one_line_and_status_1(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(SystemExit) as done:
        main(["sessions", "--redis", f"redis://127.0.0.1:{port}/0"])
    assert done.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("slotstream: ")
    assert str(port) in error
    assert len(error.splitlines()) == 1
