"""The wire as PROTOCOL.md has it: a producer of raw commands against a worker.

Nothing of the Python client or its codec is used here: frames are packed by hand, commands are
sent as the text says. Outputs are compared as the bytes of their replies.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import redis

from conftest import ThreadedWorker, streams_of, wait_until
from serving_models import direct, served
from slotstream.embedded import EmbeddedRedis

CANCEL = (Path(__file__).resolve().parent.parent / "producer/slotstream/cancel.lua").read_text()
SHAPE = (4, 6)
RETENTION = 12
TTL_S = 90.0
TOP = 2**64 - 1
BAD = b"\x81\xa5dtype\xa7float32"  # a map that lacks two of its fields

_numbers = itertools.count(1)


class Reply(NamedTuple):
    """One entry of `out`."""

    id: str
    fields: dict[bytes, bytes]

    @property
    def output(self) -> bytes | None:
        return self.fields.get(b"output")

    @property
    def error(self) -> dict[str, str]:
        value = msgpack.unpackb(self.fields[b"error"])
        assert set(value) == {"code", "message"}
        return value


def packed(array: Any) -> bytes:
    """A frame as PROTOCOL.md has it."""
    array = np.ascontiguousarray(array, "<f4")
    return msgpack.packb({"dtype": "float32", "shape": list(array.shape), "data": array.tobytes()})


def unpacked(raw: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """The outputs of a model with several, by name."""
    return {
        name: np.frombuffer(part["data"], part["dtype"]).reshape(part["shape"])
        for name, part in msgpack.unpackb(raw).items()
    }


def outputs(replies: list[Reply]) -> list[bytes]:
    return [reply.output for reply in replies if reply.output is not None]


def ids(replies: list[Reply]) -> list[str]:
    return [reply.id for reply in replies]


def order(entry: str) -> tuple[int, int]:
    ms, seq = entry.split("-")
    return int(ms), int(seq)


def assert_right(model: Any, stream: Any, raws: list[bytes]) -> None:
    """The outputs are those of one direct call over the stream, which are not trivial."""
    got = [unpacked(raw) for raw in raws]
    assert len(got) == len(stream)
    # Always one length, so that it compiles once; what comes later changes nothing before.
    padded = np.concatenate([*stream, *np.ones((40 - len(stream), *SHAPE), np.float32)])
    for name, whole in direct(model, padded).items():
        whole = whole[: 4 * len(stream)]
        np.testing.assert_allclose(
            np.concatenate([one[name] for one in got]), whole, rtol=1e-5, atol=1e-6
        )
        assert np.abs(whole.astype(float)).max() > 0.1


class Wire:
    """A producer of one app that speaks raw commands."""

    def __init__(self, url: str, app: str) -> None:
        self.app = app
        self.redis = redis.Redis.from_url(url, protocol=2, socket_timeout=15)
        self.opened: list[str] = []

    def call(self, *command: Any) -> Any:
        return self.redis.execute_command(*command)

    def key(self, kind: str, session: str | None = None) -> str:
        return f"{{{self.app}:0}}:{kind}" + ("" if session is None else f":{session}")

    def new(self) -> str:
        """A session's id that nobody has used."""
        return f"s{next(_numbers)}"

    def control(self, *fields: Any) -> None:
        self.call("XADD", self.key("control"), "*", *fields)

    def open(self, session: str | None = None, token: str | None = None, *fields: str) -> str:
        session = session or self.new()
        self.opened.append(session)
        self.control(
            "op", "open", "session", session, "token", token or secrets.token_hex(8), *fields
        )
        return session

    def close(self, session: str) -> None:
        self.control("op", "close", "session", session)

    def add(self, session: str, entry: str, *fields: Any) -> str:
        """`XADD` to `in`; returns the entry's id."""
        return self.call("XADD", self.key("in", session), entry, *fields).decode()

    def push(
        self, session: str, stream: Any, first: int | str = 1, *, end: bool = False
    ) -> list[str]:
        """Frames in order, under `first`-0 and so on, or under ids that Redis chooses (`*`)."""
        last = len(stream) - 1
        return [
            self.add(
                session,
                "*" if first == "*" else f"{int(first) + k}-0",
                "frame",
                packed(frame),
                *(("end", "1") if end and k == last else ()),
            )
            for k, frame in enumerate(stream)
        ]

    def cancel(self, session: str, entry: str) -> int:
        return self.call(
            "EVAL", CANCEL, 2, self.key("slot", session), self.key("in", session), entry
        )

    def out(self, session: str) -> list[Reply]:
        """All replies that are there now."""
        return [
            Reply(i.decode(), fields)
            for i, fields in self.call("XRANGE", self.key("out", session), "-", "+")
        ]

    def waiting(self, session: str) -> list[str]:
        """Ids in `in` now."""
        return [i.decode() for i, _ in self.call("XRANGE", self.key("in", session), "-", "+")]

    def row(self, session: str) -> dict[str, bytes]:
        held = self.redis.hgetall(self.key("slot", session))
        return {name.decode(): value for name, value in held.items()}

    def read(self, session: str, count: int | None = None, after: str = "0-1") -> list[Reply]:
        """Read `count` replies after an id (`0-1` is `opened`), or all up to the last."""
        found: list[Reply] = []
        while len(found) != count:
            answer = self.call(
                "XREAD",
                "COUNT",
                count - len(found) if count else 100,
                "BLOCK",
                10_000,
                "STREAMS",
                self.key("out", session),
                found[-1].id if found else after,
            )
            assert answer, f"no reply to {session} after {ids(found)[-3:]}; row {self.row(session)}"
            found += [Reply(i.decode(), fields) for i, fields in answer[0][1]]
            if b"end" in found[-1].fields:
                assert count in (None, len(found)), f"ended early: {found[-1]}"
                break
        return found

    def settle(self) -> None:
        """Wait until everything sent to `control` so far has been applied."""
        wait_until(lambda: self.call("XLEN", self.key("control")) == 0, 10, "control is empty")

    def finish(self) -> None:
        """Close what a test left open."""
        for session in self.opened:
            self.close(session)
        self.settle()
        left = set(self.opened)
        wait_until(
            lambda: not {s.decode() for s in self.call("SMEMBERS", self.key("sessions"))} & left,
            10,
            f"the sessions {left} are closed",
        )


class Gate:
    """Holds a worker between two turns of its loop, and lets single turns through."""

    def __init__(self, worker: ThreadedWorker) -> None:
        self.worker = worker
        self._turn = worker.worker.turn
        worker.worker.turn = self.turn
        self._changed = threading.Condition()
        self._held = self._parked = False
        self._steps = 0

    def turn(self) -> None:
        with self._changed:
            self._parked = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._held or self._steps)
            self._steps = max(self._steps - 1, 0)
            self._parked = False
        self._turn()

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._changed:
            self._held = True
            assert self._changed.wait_for(lambda: self._parked, 20), "the worker hangs"
        try:
            yield
        finally:
            with self._changed:
                self._held, self._steps = False, 0
                self._changed.notify_all()

    def step(self) -> None:
        """One turn, while held."""
        with self._changed:
            self._steps = 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._parked and not self._steps, 20), (
                f"the worker hangs: {self.worker.error}"
            )

    def step_until(self, predicate: Callable[[], Any]) -> None:
        for _ in range(500):
            if predicate():
                return
            self.step()
        raise AssertionError("not within 500 turns")


@pytest.fixture(scope="module")
def model() -> Any:
    return served()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture(scope="module")
def start(url: str, model: Any) -> Iterator[Callable[..., ThreadedWorker]]:
    started: list[ThreadedWorker] = []

    def start(app: str, **settings: Any) -> ThreadedWorker:
        started.append(ThreadedWorker(url, model, app=app, reply_ttl_s=TTL_S, **settings))
        return started[-1].start()

    yield start
    for worker in started:
        if worker.thread.is_alive():
            worker.drain()


@pytest.fixture(scope="module")
def gates() -> list[Gate]:
    return []


@pytest.fixture
def gate(gates: list[Gate], start: Callable[..., ThreadedWorker]) -> Gate:
    """The worker of app `wire`; a new one where a test has ended it."""
    if not gates or not gates[-1].worker.thread.is_alive():
        gates.append(Gate(start("wire", reply_retention=RETENTION, checkpoint_interval_s=0.1)))
    return gates[-1]


@pytest.fixture
def wire(url: str, gate: Gate) -> Iterator[Wire]:
    wire = Wire(url, "wire")
    yield wire
    assert gate.worker.thread.is_alive(), f"the worker has ended: {gate.worker.error}"
    wire.finish()
    wire.redis.close()


@pytest.fixture(scope="module")
def streams() -> dict[str, Any]:
    return streams_of(4, 12, SHAPE, seed=7)


@pytest.fixture(scope="module")
def known() -> dict[bytes, list[bytes]]:
    return {}


@pytest.fixture
def alone(wire: Wire, known: dict[bytes, list[bytes]]) -> Callable[[Any], list[bytes]]:
    """Outputs of a stream in a session of its own, with nobody else pushing."""

    def alone(stream: Any) -> list[bytes]:
        stream = np.asarray(stream)
        if stream.tobytes() not in known:
            session, replies = wire.open(), []
            # Read as they come: the worker keeps the newest RETENTION only.
            for first in range(0, len(stream), RETENTION):
                part = stream[first : first + RETENTION]
                wire.push(session, part, first + 1, end=first + RETENTION >= len(stream))
                replies += wire.read(session, len(part), after=f"{first}-{0 if first else 1}")
            known[stream.tobytes()] = outputs(replies)
        assert len(known[stream.tobytes()]) == len(stream)
        return known[stream.tobytes()]

    return alone


@pytest.fixture(scope="module")
def early(
    url: str, streams: dict[str, Any], start: Callable[..., ThreadedWorker]
) -> Iterator[Wire]:
    """App `early`: three sessions written to before any worker has run, then a worker."""
    wire = Wire(url, "early")
    wire.push("ahead", streams["s0"])
    wire.open("ahead")
    wire.open("deleted")
    wire.push("deleted", streams["s1"])
    assert wire.call("XDEL", wire.key("in", "deleted"), "3-0", "12-0") == 2
    wire.open("over")
    wire.push("over", streams["s2"][:5])
    wire.close("over")
    assert not wire.call("EXISTS", "early:config")
    start("early")
    yield wire
    wire.finish()
    wire.redis.close()


# Opening and pushing


def test_a_session_opened_before_its_first_frame_answers_each_frame(wire, gate, model, streams):
    session = wire.open()
    [opened] = wire.read(session, 1, after="0-0")
    assert opened.id == "0-1"
    assert opened.fields == {b"op": b"opened", b"worker": gate.worker.worker.config.worker.encode()}
    pushed = wire.push(session, streams["s0"][:1])
    first = wire.read(session, 1)
    pushed += wire.push(session, streams["s0"][1:], first=2)
    replies = first + wire.read(session, 11, after="1-0")
    assert ids(replies) == pushed
    assert all(set(reply.fields) == {b"output", b"weights"} for reply in replies)
    assert {reply.fields[b"weights"].decode() for reply in replies} == {model.weights[:12]}
    assert_right(model, streams["s0"], outputs(replies))


def test_frames_pushed_before_the_open_are_answered(wire, alone, streams):
    expected = alone(streams["s1"])
    session = wire.new()
    pushed = wire.push(session, streams["s1"])
    wire.open(session)
    replies = wire.read(session, 12)
    assert ids(replies) == pushed
    assert outputs(replies) == expected


def test_frames_pushed_before_any_worker_runs_are_answered(early, model, streams):
    replies = early.read("ahead", 12)
    assert ids(replies) == [f"{k}-0" for k in range(1, 13)]
    assert_right(model, streams["s0"], outputs(replies))


def test_frames_that_wait_together_are_answered_as_if_each_session_ran_alone(
    wire, gate, alone, model, streams
):
    expected = {name: alone(stream) for name, stream in streams.items()}
    with gate.held():
        sessions = {name: wire.open() for name in streams}
        for name, stream in streams.items():
            wire.push(sessions[name], stream, end=True)
    for name, stream in streams.items():
        replies = wire.read(sessions[name])
        assert ids(replies) == [f"{k}-0" for k in range(1, 13)]
        assert outputs(replies) == expected[name]
        assert_right(model, stream, outputs(replies))


def test_a_frame_pushed_twice_under_one_id_is_refused_by_redis_and_runs_once(
    wire, gate, alone, streams
):
    stream = streams["s2"][:6]
    session = wire.open()
    for k in range(6):
        with gate.held() if k == 3 else nullcontext():
            wire.push(session, stream[k : k + 1], first=k + 1)
            with pytest.raises(redis.ResponseError, match="equal or smaller"):
                wire.push(session, stream[k : k + 1], first=k + 1)
        wire.read(session, 1, after=f"{k}-0" if k else "0-1")
        if k == 4:  # also once it is in a checkpoint and gone from `in`
            wait_until(lambda: wire.waiting(session) == [], 10, "a checkpoint trims `in`")
        with pytest.raises(redis.ResponseError, match="equal or smaller"):
            wire.push(session, stream[k : k + 1], first=k + 1)
    wire.add(session, "7-0", "end", "1")
    replies = wire.read(session)
    assert ids(replies) == [f"{k}-0" for k in range(1, 8)]
    assert outputs(replies) == alone(stream)


@pytest.mark.parametrize(
    "entries",
    [
        ["*"] * 6,
        ["1", "9-0", "10-0", "10-9", "10-10", "11"],
        [
            "1-0",
            f"{2**53}-0",
            f"{2**53 + 1}-0",
            f"{2**53 + 1}-{2**53}",
            f"{2**53 + 1}-{2**53 + 1}",
            f"{TOP - 1}-{TOP}",
        ],
    ],
    ids=["chosen by redis", "of two digits", "beyond 53 bits"],
)
def test_a_reply_has_the_id_of_its_entry(wire, alone, streams, entries):
    stream = streams["s3"][:6]
    expected = alone(stream)
    session = wire.open()
    pushed = [
        wire.add(session, entry, "frame", packed(frame))
        for entry, frame in zip(entries, stream, strict=True)
    ]
    replies = wire.read(session, 6)
    assert ids(replies) == pushed
    assert outputs(replies) == expected
    wait_until(lambda: wire.row(session)["cursor"].decode() == pushed[-1], 10, "a checkpoint")
    assert wire.waiting(session) == []


def test_the_largest_id_there_is_ends_a_session_with_nothing_cancelled(wire, gate, alone, streams):
    stream = streams["s3"][:3]
    expected = alone(stream)
    session = wire.open()
    with gate.held():
        wire.push(session, stream[:2])
        wire.add(session, f"{TOP}-{TOP}", "frame", packed(stream[2]), "end", "1")
    replies = wire.read(session)
    assert ids(replies) == ["1-0", "2-0", f"{TOP}-{TOP}"]
    assert outputs(replies) == expected
    assert replies[-1].fields[b"cancelled"] == b"0"


# Ending and closing


def test_an_end_on_the_last_frame_rides_on_its_reply(wire, alone, streams):
    stream = streams["s0"][:5]
    expected = alone(stream)
    session = wire.open()
    wire.push(session, stream, end=True)
    replies = wire.read(session)
    assert [b"end" in reply.fields for reply in replies] == [False] * 4 + [True]
    assert replies[-1].id == "5-0"
    assert set(replies[-1].fields) == {b"output", b"weights", b"end", b"reason", b"cancelled"}
    assert (
        replies[-1].fields[b"end"],
        replies[-1].fields[b"reason"],
        replies[-1].fields[b"cancelled"],
    ) == (b"1", b"end", b"0")
    assert outputs(replies) == expected


def test_an_end_that_stands_alone_gets_the_last_reply(wire, alone, streams):
    stream = streams["s1"][:5]
    expected = alone(stream)
    session = wire.open()
    wire.push(session, stream)
    entry = wire.add(session, "*", "end", "1")
    replies = wire.read(session)
    assert outputs(replies) == expected
    assert replies[-1] == (entry, {b"end": b"1", b"reason": b"end", b"cancelled": b"0"})


@pytest.mark.parametrize("behind", [1, 30])
def test_entries_behind_an_end_are_cancelled_and_counted(wire, gate, alone, streams, behind):
    stream = streams["s2"][:4]
    expected = alone(stream)
    session = wire.open()
    with gate.held():
        wire.push(session, stream, end=True)
        wire.push(session, np.tile(streams["s3"], (3, 1, 1))[:behind], first=5)
    replies = wire.read(session)
    assert ids(replies) == ["1-0", "2-0", "3-0", "4-0"]
    assert outputs(replies) == expected
    assert replies[-1].fields[b"cancelled"] == str(behind).encode()
    assert not wire.call("EXISTS", wire.key("in", session))


def test_a_close_before_any_worker_runs_cancels_all_frames(early):
    [last] = early.read("over", after="0-0")
    # It answers no entry, so it comes behind the last id of `in`, which is 5-0.
    assert last == ("5-1", {b"end": b"1", b"reason": b"close", b"cancelled": b"5"})


def test_a_close_of_a_session_that_waits_for_a_full_worker_cancels_its_frames(wire, alone, streams):
    expected = alone(streams["s0"][:3])
    held = [wire.open() for _ in range(8)]  # all slots
    for session in held:
        wire.read(session, 1, after="0-0")
    late = wire.open()
    wire.push(late, streams["s1"][:7])
    wire.settle()
    assert wire.row(late)["status"] == b"waiting"
    assert wire.call("ZRANGE", wire.key("waiting"), 0, -1) == [late.encode()]
    assert wire.out(late) == []
    wire.close(late)
    assert wire.read(late, after="0-0") == [
        ("7-1", {b"end": b"1", b"reason": b"close", b"cancelled": b"7"})
    ]
    assert wire.call("ZCARD", wire.key("waiting")) == 0
    wire.push(held[5], streams["s0"][:3])
    assert outputs(wire.read(held[5], 3)) == expected


def test_a_session_that_waits_gets_the_slot_of_one_that_ends(wire, alone, streams):
    expected = alone(streams["s2"][:3])
    held = [wire.open() for _ in range(8)]
    for session in held:
        wire.read(session, 1, after="0-0")
    late = wire.open()
    wire.push(late, streams["s2"][:3])
    wire.settle()
    assert wire.out(late) == []
    wire.add(held[3], "1-0", "end", "1")
    assert outputs(wire.read(late, 3)) == expected


@pytest.mark.parametrize("first", [1, "*"], ids=["own ids", "ids of redis"])
def test_a_close_of_a_live_session_answers_or_counts_every_frame(wire, gate, alone, streams, first):
    stream = np.concatenate([streams["s1"], streams["s2"], streams["s3"]])
    expected = alone(stream)
    # Its replies wait for the reader, who could else find the oldest of them gone.
    session = wire.open(None, None, "replies", "wait")
    wire.push(session, stream[:2], first=first)
    wire.read(session, 2)
    with gate.held():
        pushed = wire.push(session, stream[2:], first if first == "*" else 3)
        wire.close(session)
    replies = wire.read(session)
    last = replies.pop()
    cancelled = int(last.fields[b"cancelled"])
    assert last.fields == {b"end": b"1", b"reason": b"close", b"cancelled": str(cancelled).encode()}
    assert order(last.id) > order(pushed[-1])
    assert cancelled > 0
    assert len(replies) + cancelled == len(stream)
    assert outputs(replies) == expected[: len(replies)]
    assert not wire.call("EXISTS", wire.key("in", session))


def test_frames_behind_a_close_are_counted_and_the_mark_is_not(wire, gate, streams):
    session = wire.open()
    wire.push(session, streams["s1"][:2], first="*")
    wire.read(session, 2)
    with gate.held():
        wire.push(session, streams["s2"], first="*")
        wire.close(session)
        # Turn by turn until the worker has appended its mark, but not yet closed.
        gate.step_until(lambda: wire.row(session)["status"] == b"closing")
        assert b"end" not in wire.out(session)[-1].fields
        wire.push(session, streams["s3"][:5], first="*")
    replies = wire.read(session)
    assert len(replies) - 1 + int(replies[-1].fields[b"cancelled"]) == 2 + 12 + 5
    assert int(replies[-1].fields[b"cancelled"]) >= 5


def test_a_close_repeated_or_of_a_session_that_never_was_does_nothing(wire, alone, streams):
    expected = alone(streams["s3"][:3])
    session = wire.open()
    wire.close(wire.new())
    wire.push(session, streams["s3"][:3])
    assert outputs(wire.read(session, 3)) == expected
    wire.close(session)
    [last] = wire.read(session, after="3-0")
    wire.close(session)
    wire.close(session)
    wire.settle()
    assert wire.out(session)[-1] == last
    assert last.fields[b"cancelled"] == b"0"


# Cancelling


def test_a_frame_that_waits_is_cancelled_by_the_script(wire, gate, alone, streams):
    stream = streams["s0"]
    expected = alone(np.delete(stream, [2, 6], axis=0))
    session = wire.open()
    wire.read(session, 1, after="0-0")
    with gate.held():
        wire.push(session, stream, end=True)
        assert wire.cancel(session, "3-0") == 1
        assert wire.cancel(session, "7-0") == 1
        assert wire.cancel(session, "7-0") == 0
        assert wire.row(session)["cuts"] == b"2"
    replies = wire.read(session)
    assert ids(replies) == [f"{k}-0" for k in range(1, 13) if k not in (3, 7)]
    assert outputs(replies) == expected
    assert replies[-1].fields[b"cancelled"] == b"0"


@pytest.mark.parametrize("ahead", [1, 2, 3, 6, 9])
def test_a_frame_the_worker_has_read_is_cancelled_by_the_script(wire, gate, alone, streams, ahead):
    # The first is in flight or run, and not answered; the others are read and wait.
    stream = streams["s1"]
    session = wire.open()
    wire.read(session, 1, after="0-0")
    with gate.held():
        wire.push(session, stream, end=True)
        gate.step_until(lambda: len(wire.out(session)) > 1)
        victim = order(wire.out(session)[-1].id)[0] + ahead
        assert wire.cancel(session, f"{victim}-0") == 1
    replies = wire.read(session)
    assert ids(replies) == [f"{k}-0" for k in range(1, 13) if k != victim]
    assert outputs(replies) == alone(np.delete(stream, victim - 1, axis=0))


def test_a_cancel_is_refused_once_the_frame_has_been_answered(wire, gate, alone, streams):
    stream = streams["s2"]
    expected = alone(stream)
    session = wire.open()
    wire.push(session, stream[:6])
    wire.read(session, 6)
    assert [wire.cancel(session, f"{k}-0") for k in range(1, 7)] == [-1] * 6
    with gate.held():
        wire.push(session, stream[6:], first=7, end=True)
        gate.step_until(lambda: wire.out(session)[-1].id == "8-0")
        assert [wire.cancel(session, f"{k}-0") for k in (7, 8)] == [-1, -1]
        assert wire.row(session)["cuts"] == b"0"
    assert outputs(wire.read(session)) == expected


def test_an_entry_deleted_before_any_worker_ran_has_no_reply(early, model, streams):
    early.add("deleted", "13-0", "end", "1")
    replies = early.read("deleted")
    assert ids(replies) == [f"{k}-0" for k in range(1, 14) if k not in (3, 12)]
    assert_right(model, np.delete(streams["s1"], [2, 11], axis=0), outputs(replies))
    assert replies[-1].fields[b"reason"] == b"end"


# Opening again


def test_an_id_used_again_starts_at_rest_with_fresh_replies(wire, alone, streams):
    session = wire.new()
    for name in ("s0", "s3", "s0"):
        expected = alone(streams[name])
        wire.call("DEL", wire.key("in", session), wire.key("out", session))
        wire.push(session, streams[name], end=True)
        wire.open(session)
        replies = wire.read(session, after="0-0")
        assert ids(replies) == ["0-1", *(f"{k}-0" for k in range(1, 13))]
        assert outputs(replies) == expected


def test_an_open_repeated_with_its_token_does_nothing(wire, alone, streams):
    stream, token = streams["s1"], secrets.token_hex(32)  # 64 bytes, the longest
    expected = alone(stream)
    session = wire.open(token=token)
    wire.open(session, token)
    wire.push(session, stream[:6])
    wire.read(session, 6)
    before = wire.row(session)
    wire.open(session, token)
    wire.open(session, "another")
    wire.settle()
    assert {name: wire.row(session)[name] for name in ("status", "epoch", "token", "opened")} == {
        name: before[name] for name in ("status", "epoch", "token", "opened")
    }
    wire.push(session, stream[6:], first=7, end=True)
    replies = wire.read(session, after="0-0")
    assert ids(replies) == ["0-1", *(f"{k}-0" for k in range(1, 13))]
    assert outputs(replies) == expected
    # And after the end.
    tombstone = wire.row(session)
    wire.open(session, token)
    wire.settle()
    assert wire.row(session) == tombstone
    assert wire.out(session) == replies
    assert not wire.call("SISMEMBER", wire.key("sessions"), session)


def test_an_open_with_a_new_token_after_the_end_deletes_the_old_replies(wire, alone, streams):
    expected = alone(streams["s2"])
    session = wire.open()
    wire.push(session, streams["s1"], end=True)
    wire.read(session)
    wire.open(session)
    wait_until(lambda: ids(wire.out(session)) == ["0-1"], 10, "the session is open again")
    wire.push(session, streams["s2"], end=True)
    assert outputs(wire.read(session)) == expected


def test_the_opened_reply_comes_once_also_after_the_worker_was_restarted(
    url, start, wire, alone, streams
):
    stream = streams["s0"]
    expected = alone(stream)
    again = Wire(url, "again")
    first = start("again")
    session = again.open()
    again.push(session, stream[:5])
    again.add(session, "6-0", "frame", BAD)
    again.read(session, 6)
    first.drain()
    assert again.row(session)["status"] == b"waiting"
    again.push(session, stream[5:8], first=7)  # while no worker runs
    second = start("again")
    replies = again.read(session, 9)
    again.push(session, stream[8:], first=10, end=True)
    replies += again.read(session, after="9-0")
    assert ids(replies) == [f"{k}-0" for k in range(1, 14)]
    assert outputs(replies) == expected
    assert again.out(session)[0] == (
        "0-1",
        {b"op": b"opened", b"worker": first.worker.config.worker.encode()},
    )
    assert [reply.fields.get(b"op") for reply in again.out(session)[1:]] == [None] * 13
    second.drain()
    again.redis.close()


# Control


def test_control_entries_are_deleted_and_unknown_ones_block_nothing(wire, gate, alone, streams):
    expected = alone(streams["s3"][:4])
    with gate.held():
        for _ in range(15):
            wire.control("op", "frobnicate", "session", "a")
            wire.control("op", "open")
            wire.control("session", "a")
            wire.control("op", "open", "session", "")
            wire.control("op", "open", "session", "a b")
            wire.control("op", "open", "session", "x" * 129)
            wire.control("op", "open", "session", b"\xff\x00\n")
            wire.control("op", "open", "session", "long-token", "token", "t" * 65)
            wire.control(b"\xfe", b"\x00")
        session = wire.open()
        wire.push(session, streams["s3"][:4])
    assert outputs(wire.read(session, 4)) == expected
    wire.settle()
    assert wire.call("SMEMBERS", wire.key("sessions")) == {session.encode()}
    assert not wire.call("EXISTS", wire.key("slot", "long-token"))


# Operations


def test_a_reset_alone_returns_the_session_to_rest(wire, alone, streams):
    before, after = streams["s0"][:5], streams["s1"][:5]
    expected = alone(before) + alone(after)
    session = wire.open()
    wire.push(session, before)
    wire.add(session, "6-0", "op", "reset")
    wire.push(session, after, first=7)
    replies = wire.read(session, 11)
    assert replies[5] == ("6-0", {b"op": b"reset"})
    assert outputs(replies) == expected
    assert outputs(replies)[5:] != alone(streams["s0"])[5:10]


def test_a_reset_with_a_frame_acts_before_the_frame(wire, alone, streams):
    before, after = streams["s2"][:5], streams["s3"][:5]
    expected = alone(before) + alone(after)
    session = wire.open()
    wire.push(session, before)
    wire.add(session, "6-0", "op", "reset", "frame", packed(after[0]))
    wire.push(session, after[1:], first=7)
    replies = wire.read(session, 10)
    assert set(replies[5].fields) == {b"output", b"weights", b"op"}
    assert replies[5].fields[b"op"] == b"reset"
    assert outputs(replies) == expected


@pytest.mark.parametrize(
    "entry",
    [
        ("op", "reset", "frame", BAD),
        ("frame", b"", "op", "reset"),
        ("op", "reset", "colour", "blue"),
        ("op", "reset", "frame", packed(np.ones(SHAPE)), "priority", "1"),
        ("op", "fork", "target", "a/1", "frame", packed(np.ones(SHAPE))),
        ("op", "restart", "frame", packed(np.ones(SHAPE))),
    ],
    ids=[
        "bad frame",
        "empty frame",
        "unknown field",
        "unknown field and frame",
        "fork",
        "unknown op",
    ],
)
def test_an_operation_beside_what_is_bad_changes_nothing(wire, alone, streams, entry):
    expected = alone(streams["s0"][:8])
    session = wire.open()
    wire.push(session, streams["s0"][:4])
    wire.add(session, "5-0", *entry)
    wire.push(session, streams["s0"][4:8], first=6)
    replies = wire.read(session, 9)
    assert set(replies[4].fields) == {b"error"}
    assert outputs(replies) == expected


def test_an_end_beside_what_is_bad_still_ends(wire, alone, streams):
    expected = alone(streams["s1"][:4])
    session = wire.open()
    wire.push(session, streams["s1"][:4])
    wire.add(session, "5-0", "op", "reset", "frame", BAD, "end", "1")
    replies = wire.read(session)
    assert outputs(replies) == expected
    assert set(replies[-1].fields) == {b"error", b"end", b"reason", b"cancelled"}
    assert replies[-1].error["code"] == "missing_field"
    assert replies[-1].fields[b"reason"] == b"end"


def test_a_reset_that_ends_says_both(wire, streams):
    session = wire.open()
    wire.push(session, streams["s1"][:2])
    wire.add(session, "3-0", "op", "reset", "end", "1")
    assert wire.read(session)[-1] == (
        "3-0",
        {b"op": b"reset", b"end": b"1", b"reason": b"end", b"cancelled": b"0"},
    )


# Sessions apart


def test_sessions_whose_ids_differ_only_behind_a_slash_are_apart(wire, gate, alone, streams):
    stem = wire.new()
    names = [stem, f"{stem}/1", f"{stem}/1/", f"{stem}//1"]
    expected = [alone(stream) for stream in streams.values()]
    with gate.held():
        for name, stream in zip(names, streams.values(), strict=True):
            wire.open(name)
            wire.push(name, stream, end=True)
    for name, one in zip(names, expected, strict=True):
        assert outputs(wire.read(name)) == one
    assert len({one[0] for one in expected}) == 4


@pytest.mark.parametrize(
    ("when", "make"),
    [
        ("before the open", ("SET", "x")),
        ("before the open", ("HSET", "a", "b")),
        ("later", ("SET", "x")),
        ("later", ("RPUSH", "a", "b")),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_an_inbox_that_is_no_stream_harms_no_other_session(wire, alone, streams, when, make):
    expected = alone(streams["s1"])
    odd, other = wire.new(), wire.open()
    if when == "later":
        wire.open(odd)
        wire.push(odd, streams["s0"][:2])
        wire.read(odd, 2)
        wire.call("DEL", wire.key("in", odd))
    wire.call(make[0], wire.key("in", odd), *make[1:])
    wire.open(odd)
    wire.push(other, streams["s1"][:6])
    wire.read(other, 6)
    wire.settle()
    wire.push(other, streams["s1"][6:], first=7)
    assert outputs(wire.read(other, 12)) == expected
    wire.close(odd)
    last = wire.read(odd)[-1]
    assert last.fields == {b"end": b"1", b"reason": b"close", b"cancelled": b"0"}


def test_an_inbox_that_becomes_a_stream_again_is_served(wire, alone, streams):
    expected = alone(streams["s2"][:4])
    session = wire.new()
    wire.call("SET", wire.key("in", session), "x")
    wire.open(session)
    wire.read(session, 1, after="0-0")
    wire.call("DEL", wire.key("in", session))
    wire.push(session, streams["s2"][:4], end=True)
    assert outputs(wire.read(session)) == expected


@pytest.mark.parametrize(
    "entry", [f"{TOP}-1", f"{TOP}-{TOP}", None], ids=["large id", "largest id", "no stream"]
)
def test_replies_that_cannot_be_published_end_their_session_only(wire, gate, alone, streams, entry):
    expected = alone(streams["s3"])
    odd, other = wire.open(), wire.open()
    wire.push(odd, streams["s0"][:3])
    wire.push(other, streams["s3"][:5])
    wire.read(odd, 3)
    wire.read(other, 5)
    if entry:
        wire.call("XADD", wire.key("out", odd), entry, "some", "thing")
    else:
        wire.call("DEL", wire.key("out", odd))
        wire.call("SET", wire.key("out", odd), "x")
    with gate.held():  # a push after the end would make a stream of its own
        wire.push(odd, streams["s0"][3:6], first=4)
        wire.push(other, streams["s3"][5:], first=6)
    assert outputs(wire.read(other, 12)) == expected
    wait_until(lambda: wire.row(odd)["status"] == b"closed", 10, "the odd session is closed")
    assert not wire.call("SISMEMBER", wire.key("sessions"), odd)
    assert not wire.call("EXISTS", wire.key("in", odd))
    if entry == f"{TOP}-1":
        last = wire.out(odd)[-1]
        assert last.id == f"{TOP}-2"
        assert last.fields[b"reason"] == b"reply_conflict"
    # Its id can be used again, once its streams are deleted.
    wire.call("DEL", wire.key("in", odd), wire.key("out", odd))
    wire.push(odd, streams["s3"])
    wire.open(odd)
    wait_until(
        lambda: (
            wire.redis.type(wire.key("out", odd)) == b"stream" and ids(wire.out(odd))[:1] == ["0-1"]
        ),
        10,
        "the session is open again",
    )
    assert outputs(wire.read(odd, 12)) == expected


@pytest.mark.parametrize(
    "make", [("XADD", f"{TOP}-{TOP}", "a", "b"), ("SET", "x")], ids=["largest id", "no stream"]
)
def test_an_outbox_left_by_somebody_is_deleted_by_the_open(wire, alone, streams, make):
    expected = alone(streams["s0"][:4])
    session = wire.new()
    wire.call(make[0], wire.key("out", session), *make[1:])
    wire.push(session, streams["s0"][:4], end=True)
    wire.open(session)
    wait_until(lambda: wire.row(session).get("status") == b"closed", 10, "the session has ended")
    replies = wire.out(session)
    assert ids(replies) == ["0-1", "1-0", "2-0", "3-0", "4-0"]
    assert outputs(replies) == expected


# Retention


def test_a_session_whose_replies_wait_pauses_instead_of_losing_them(wire, alone, streams):
    stream = np.concatenate([streams["s0"], streams["s1"], streams["s2"], streams["s3"][:4]])
    expected, others = alone(stream), alone(streams["s3"])
    session, other = wire.open(None, None, "replies", "wait"), wire.open()
    wire.push(session, stream, end=True)
    wait_until(lambda: len(wire.out(session)) >= RETENTION, 10, "`out` is full")
    wire.push(other, streams["s3"])
    assert outputs(wire.read(other, 12)) == others  # the others go on
    full = wire.out(session)
    assert ids(full) == ["0-1", *(f"{k}-0" for k in range(1, len(full)))]
    assert RETENTION <= len(full) <= RETENTION + 2
    wire.push(other, streams["s3"], first=13)
    wire.read(other, 12, after="12-0")
    assert wire.out(session) == full  # it does pause
    assert wire.row(session)["status"] == b"live"

    read: list[Reply] = []
    while not read or b"end" not in read[-1].fields:
        read += wire.read(session, 1, after=read[-1].id if read else "0-0")
        wire.call("XTRIM", wire.key("out", session), "MINID", read[-1].id)
        assert len(wire.out(session)) <= RETENTION + 2
    assert ids(read) == ["0-1", *(f"{k}-0" for k in range(1, 41))]
    assert outputs(read) == expected


def test_a_paused_session_can_be_cancelled_from_and_goes_on(wire, alone, streams):
    stream = np.concatenate([streams["s2"], streams["s3"]])
    expected = alone(np.delete(stream, [15, 19], axis=0))
    session = wire.open(None, None, "replies", "wait")
    wire.push(session, stream, end=True)
    wait_until(lambda: len(wire.out(session)) >= RETENTION, 10, "`out` is full")
    assert [wire.cancel(session, entry) for entry in ("16-0", "20-0")] == [1, 1]
    seen = wire.out(session)
    wire.call("XTRIM", wire.key("out", session), "MINID", seen[-1].id)
    replies = seen[1:] + wire.read(session, 22 - len(seen[1:]), after=seen[-1].id)
    assert ids(replies) == [f"{k}-0" for k in range(1, 25) if k not in (16, 20)]
    assert outputs(replies) == expected


def test_a_paused_session_can_be_closed(wire, streams):
    stream = np.concatenate([streams["s2"], streams["s3"]])
    session = wire.open(None, None, "replies", "wait")
    wire.push(session, stream)
    wait_until(lambda: len(wire.out(session)) >= RETENTION, 10, "`out` is full")
    wire.close(session)
    replies = wire.read(session)
    assert len(replies) - 1 + int(replies[-1].fields[b"cancelled"]) == 24
    assert replies[-1].fields[b"reason"] == b"close"


def test_without_wait_an_open_session_keeps_the_newest_replies(wire, streams):
    stream = np.tile(streams["s1"], (25, 1, 1))
    session = wire.open()
    wire.push(session, stream)
    wait_until(lambda: ids(wire.out(session))[-1:] == ["300-0"], 20, "all are answered")
    kept = ids(wire.out(session))
    assert kept == [f"{k}-0" for k in range(301 - len(kept), 301)]
    assert RETENTION <= len(kept) < 300


# What is left


def test_after_a_checkpoint_the_row_says_so_and_the_inbox_is_trimmed_exactly(
    wire, gate, alone, streams
):
    """Also at every moment before: row, `in` and `out` agree with one another."""
    stream = np.stack([np.ones(SHAPE, np.float32) * np.sin(k + 1) for k in range(3)])
    expected = alone(streams["s0"][:3]) + alone(stream) + alone(streams["s1"][:8])
    entries = {f"{k + 1}-0": ("frame", packed(streams["s0"][k])) for k in range(3)}
    entries |= {"4-0": ("frame", BAD), "5-0": ("op", "reset")}
    entries |= {f"{k + 6}-0": ("frame", packed(frame)) for k, frame in enumerate(stream)}
    entries |= {"9-0": ("op", "unknown"), "10-0": ("colour", "blue")}
    entries |= {"11-0": ("op", "reset", "frame", packed(streams["s1"][0]))}
    entries |= {f"{k + 11}-0": ("frame", packed(streams["s1"][k])) for k in range(1, 8)}
    without_effect = {"4-0", "9-0", "10-0"}
    session = wire.open()
    wire.read(session, 1, after="0-0")
    pushed: list[str] = []
    partly = 0

    def check() -> bytes:
        nonlocal partly
        pipeline = wire.redis.pipeline(transaction=True)
        pipeline.hgetall(wire.key("slot", session))
        pipeline.execute_command("XRANGE", wire.key("in", session), "-", "+")
        pipeline.execute_command("XRANGE", wire.key("out", session), "-", "+")
        row, inbox, outbox = pipeline.execute()
        cursor, done = order(row[b"cursor"].decode()), order(row[b"done"].decode())
        since = [entry for entry in pushed if cursor < order(entry) <= done]
        assert [i.decode() for i, _ in inbox] == [e for e in pushed if order(e) > cursor]
        assert [i.decode() for i, _ in outbox][1:] == [e for e in pushed if order(e) <= done]
        assert int(row[b"count"]) == len(since)
        assert row[b"skipped"].decode().split() == [e for e in since if e in without_effect]
        partly += cursor < done
        return row[b"cursor"]

    with gate.held():
        for part in (dict(list(entries.items())[:10]), dict(list(entries.items())[10:])):
            pushed += [wire.add(session, entry, *fields) for entry, fields in part.items()]
            gate.step_until(lambda last=pushed[-1]: check().decode() == last)
    assert partly > 3
    row = wire.row(session)
    assert row["cursor"] == row["done"] == b"18-0"
    assert (row["count"], row["skipped"], row["status"]) == (b"0", b"", b"live")
    assert row["owner"] == gate.worker.worker.config.worker.encode()
    assert len(row["state"]) > 0
    assert wire.waiting(session) == []
    assert outputs(wire.read(session, 18)) == expected


def test_a_closed_session_leaves_a_tombstone_that_expires_with_its_replies(wire, streams):
    token = secrets.token_hex(8)
    session = wire.open(token=token)
    wire.push(session, streams["s0"][:3])
    wire.read(session, 3)
    assert wire.call("PTTL", wire.key("slot", session)) == -1
    assert wire.call("PTTL", wire.key("out", session)) == -1
    wire.add(session, "4-0", "end", "1")
    wire.read(session)
    assert wire.row(session) == {"status": b"closed", "token": token.encode(), "end": b"4-0"}
    for kind in ("slot", "out"):
        assert 0 < wire.call("PTTL", wire.key(kind, session)) <= 1000 * TTL_S
    assert not wire.call("EXISTS", wire.key("in", session))


def test_when_all_sessions_are_closed_nothing_of_them_is_left(url, start, streams):
    wire = Wire(url, "empty")
    worker = start("empty", slots=4)
    a, b, c, d = (wire.open() for _ in range(4))
    for session in (a, b, c, d):
        wire.read(session, 1, after="0-0")
    wire.push(a, streams["s0"], end=True)
    wire.push(a, streams["s1"], first=13)
    wire.push(b, streams["s1"])
    wire.add(c, "1-0", "frame", BAD, "op", "reset")
    wire.push(c, streams["s2"], first=2, end=True)
    late = wire.open()  # waits, since there is no room
    wire.push(late, streams["s3"])
    wire.close(late)
    wire.close(b)
    wire.add(d, "*", "end", "1")
    for session in (a, b, c, d, late):
        wire.read(session, after="0-0")
    # A push behind the end of `a` may have come too late: its stream is its producer's own.
    wire.call("DEL", wire.key("in", a))
    name = worker.worker.config.worker
    stay = {"empty:config", *map(wire.key, ("control", "epoch", "workers", f"lease:{name}"))}
    stay |= {"empty:weights:{empty}:workers", f"empty:weights:{{empty}}:worker:{name}"}
    ends = {wire.key(kind, s) for kind in ("out", "slot") for s in (a, b, c, d, late)}

    def keys() -> set[str]:
        return {key.decode() for key in wire.redis.scan_iter("*empty*", count=1000)}

    assert keys() - ends <= stay
    assert ends <= keys()
    assert all(0 < wire.call("PTTL", key) <= 1000 * TTL_S for key in ends)
    worker.drain()
    assert keys() - ends <= {"empty:config", wire.key("control"), wire.key("epoch")}
    wire.redis.close()
