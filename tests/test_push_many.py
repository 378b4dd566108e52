"""Many frames in few round trips: each once, in its session's order, whatever comes between."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import slotstream
from conftest import ThreadedWorker, streams_of, wait_until
from serving_models import served
from slotstream import BadFrame, Client, EntryId, OutOfOrder, ReplyTimeout, SessionClosed
from slotstream.embedded import EmbeddedRedis
from test_client import Proxy, bits
from test_wire import SHAPE, Wire

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="module")
def worker(server: EmbeddedRedis) -> Iterator[ThreadedWorker]:
    worker = ThreadedWorker(server.url, served(), slots=64, checkpoint_interval_s=0.1).start()
    yield worker
    worker.drain()


@pytest.fixture
def client(server: EmbeddedRedis, worker: ThreadedWorker) -> Iterator[Client]:
    with Client(server.url, patience_s=10.0) as client:
        yield client


@pytest.fixture
def raw(server: EmbeddedRedis) -> Iterator[Wire]:
    wire = Wire(server.url, "slotstream")
    yield wire
    wire.redis.close()


@pytest.fixture
def nobody(server: EmbeddedRedis) -> Iterator[Client]:
    """A client of an app that no worker serves, with a window of 4."""
    app = f"nobody-{next(_numbers)}"
    with Client(server.url, app, window=4, patience_s=10.0) as client:
        yield client


@pytest.fixture(scope="module")
def streams() -> dict[str, Any]:
    return streams_of(3, 20, SHAPE, seed=31)


@pytest.fixture(scope="module")
def expected(server: EmbeddedRedis, worker: ThreadedWorker, streams: Any) -> dict[str, list[Any]]:
    """The outputs of each stream, its frames pushed one by one."""
    found = {}
    with Client(server.url) as client:
        for name, stream in streams.items():
            session = client.open()
            for frame in stream:
                session.push(frame)
            session.end()
            found[name] = bits(session.replies())
            assert len(found[name]) == 20
    return found


def test_frames_pushed_together_are_answered_in_order(client, streams, expected):
    sessions = dict(zip(streams, client.open_many(["a/1", "a/2", "b"], new=True), strict=True))
    pushed = client.push_many({sessions[name]: streams[name][:7] for name in streams})
    later = client.push_many(
        {session: (frame for frame in streams[name][7:]) for name, session in sessions.items()},
        end=True,
    )
    for name, session in sessions.items():
        replies = list(session.replies())
        assert bits(replies) == expected[name]
        assert [reply.id for reply in replies] == pushed[session] + later[session]
        assert pushed[session] + later[session] == sorted(set(pushed[session] + later[session]))
        assert [reply.end for reply in replies] == [False] * 19 + [True]
        assert all(0 < reply.latency_s < 60 for reply in replies)


def test_one_session_takes_many_and_any_other_push_between(client, streams, expected):
    session = client.open()
    ids = session.push_many(streams["s0"][:3])
    ids.append(session.push(streams["s0"][3]))
    ids += session.push_many(list(streams["s0"][4:5]))
    assert session.push_many([]) == []
    ids += session.push_many(streams["s0"][5:].astype(">f8"))
    ids += session.push_many([], end=True)
    assert len(set(ids)) == 21
    replies = list(session.replies())
    assert [reply.id for reply in replies] == ids
    assert bits(replies) == expected["s0"]


def test_a_window_is_never_exceeded_and_replies_read_for_room_are_kept(client, streams, expected):
    client.window = 3
    sessions = dict(zip(streams, (client.open() for _ in streams), strict=True))
    most = 0
    take = slotstream.Session.take

    def counted(self: Any, *entry: Any) -> Any:
        nonlocal most
        most = max(most, self.in_flight)
        return take(self, *entry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slotstream.Session, "take", counted)
        client.push_many({sessions[name]: streams[name] for name in streams}, end=True)
        got = {name: list(session.replies()) for name, session in sessions.items()}
    assert most == 3
    assert {name: bits(replies) for name, replies in got.items()} == expected


def test_frames_written_into_one_array_in_turn_are_each_their_own(client, streams, expected):
    def drawn(name: str) -> Iterator[Any]:
        array = np.empty(SHAPE, np.float32)
        for frame in streams[name]:
            array[:] = frame
            yield array

    session = client.open()
    session.push_many(drawn("s1"), end=True)
    assert bits(session.replies()) == expected["s1"]
    got = client.run({f"reused-{name}": drawn(name) for name in streams})
    assert {name[7:]: bits(replies) for name, replies in got.items()} == expected


@pytest.mark.parametrize("as_array", [True, False], ids=["an array", "a list"])
def test_of_a_batch_with_a_bad_frame_nothing_is_sent(client, raw, streams, expected, as_array):
    good, bad = client.open(), client.open()
    frames = np.ones((3, 4, 5), np.float32) if as_array else [*streams["s1"][:2], np.ones((4, 5))]
    with pytest.raises(BadFrame, match=rf"{bad.id}.*\[4, 6\].*\[4, 5\].*nothing") as refused:
        client.push_many({good: streams["s0"], bad: frames})
    assert refused.value.code == "shape"
    assert as_array or "frame 2" in str(refused.value)
    with pytest.raises(BadFrame, match="complex64"):
        client.push_many({good: streams["s0"], bad: np.ones((2, *SHAPE), np.complex64)})
    assert raw.waiting(good.id) == raw.waiting(bad.id) == []
    assert good.in_flight == bad.in_flight == 0
    good.push_many(streams["s0"], end=True)
    assert bits(good.replies()) == expected["s0"]


def test_a_session_that_has_ended_is_refused_before_anything_is_sent(client, raw, streams):
    ended, other = client.open(), client.open()
    ended.end()
    list(ended.replies())
    with pytest.raises(SessionClosed, match=ended.id):
        client.push_many({other: streams["s0"], ended: streams["s1"]})
    assert raw.waiting(other.id) == []


def test_a_session_that_ends_on_the_way_says_how_much_of_it_was_left(client, streams, expected):
    client.window = 4
    closed, other = client.open(), client.open()
    closed.push_many(streams["s1"][:4])
    closed.close()
    with pytest.raises(SessionClosed, match=rf"{closed.id} has ended \(close\), and \d+ of"):
        client.push_many({closed: streams["s1"], other: streams["s0"]}, end=True)
    assert bits(other.replies()) == expected["s0"]


def test_windows_that_stay_full_are_a_timeout_after_what_there_was_room_for(nobody, streams):
    sessions = nobody.open_many(["x", "y"], new=True)
    with pytest.raises(ReplyTimeout, match=r"0.05 s.*2 sessions.*\(x, y.*worker"):
        nobody.push_many(dict.fromkeys(sessions, streams["s0"]), timeout_s=0.05)
    assert [session.in_flight for session in sessions] == [4, 4]
    assert [nobody.redis.xlen(session.inbox) for session in sessions] == [4, 4]


def test_frames_go_before_the_app_is_known_too(nobody):
    session = nobody.open("early", keep_frames=True)
    arrays = [np.arange(6, dtype=np.int16).reshape(3, 2), np.float64([[0.5, 2.0]])]
    pushed = session.push_many(arrays)
    entries = nobody.redis.xrange(session.inbox)
    assert [EntryId.parse(entry) for entry, _ in entries] == pushed
    for (_, fields), array in zip(entries, arrays, strict=True):
        got = slotstream.decode(fields[b"frame"])
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)


def test_another_clients_sessions_are_refused(client, nobody, streams):
    with pytest.raises(ValueError, match="another client's"):
        client.push_many({nobody.open("foreign"): streams["s0"]})


# What comes between


def test_what_goes_together_in_a_session_is_a_transaction(client, raw, streams):
    # Else no memory could keep one frame out and let the next in. One alone needs none.
    def transactions() -> int:
        return raw.redis.info("commandstats").get("cmdstat_exec", {"calls": 0})["calls"]

    sessions = [client.open() for _ in range(3)]
    before = transactions()
    client.push_many(dict.fromkeys(sessions, streams["s0"][:1]))
    assert transactions() == before
    client.push_many(dict.fromkeys(sessions, streams["s0"][1:4]))
    assert transactions() == before + 3
    for session in sessions:
        session.close()


def test_pushes_whose_answers_were_cut_off_run_once(server, worker, streams, expected):
    with Proxy(server.port) as proxy, Client(proxy.url, patience_s=10.0) as client:
        sessions = dict(zip(streams, (client.open() for _ in streams), strict=True))
        for start in (0, 6, 7):
            proxy.cut(f"in:{sessions['s1'].id}")
            proxy.cut("XRANGE")  # the look at what is there, too
            stop = {0: 6, 6: 7, 7: 20}[start]
            client.push_many({sessions[name]: streams[name][start:stop] for name in streams})
        assert proxy.cuts == 6
        for name, session in sessions.items():
            session.end()
            replies = list(session.replies())
            assert bits(replies) == expected[name]
            assert len(replies) == 21


def test_a_condition_that_passes_lets_no_frame_overtake_another(client, raw, streams, expected):
    sessions = dict(zip(streams, (client.open() for _ in streams), strict=True))
    wait_until(lambda: all(raw.row(s.id) for s in sessions.values()), 10, "they are open")
    raw.call("CONFIG", "SET", "maxmemory", "1")
    thread = threading.Timer(0.3, raw.call, ("CONFIG", "SET", "maxmemory", "0"))
    thread.start()
    try:
        client.push_many({sessions[name]: streams[name] for name in streams}, end=True)
    finally:
        thread.join()
        raw.call("CONFIG", "SET", "maxmemory", "0")
    for name, session in sessions.items():
        replies = list(session.replies())
        assert bits(replies) == expected[name]
        assert len(replies) == 20


def test_frames_come_after_those_that_somebody_else_pushed(client, raw, streams, expected):
    session = client.open()
    raw.add(session.id, f"{2**50}-7", "op", "reset")  # larger than all that the client numbers
    ids = session.push_many(streams["s2"])
    assert ids == sorted(ids)
    assert ids[0] > EntryId(2**50, 7)
    session.end()
    replies = list(session.replies())
    assert [reply.id for reply in replies[1:-1]] == ids  # the first is the reset's
    assert bits(replies) == expected["s2"]


def test_two_clients_that_push_at_once_keep_each_its_own_order(server, client, raw, streams):
    session = client.open()
    with Client(server.url, window=200) as other:
        attached = other.attach(session.id)
        ids: dict[str, list[EntryId]] = {"a": [], "b": []}

        def push(which: str, into: Any) -> None:
            for k in range(10):
                ids[which] += into.push_many(streams["s0"][: 2 + k])

        session.window = 200
        threads = [
            threading.Thread(target=push, args=pair) for pair in (("a", session), ("b", attached))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        session.end()
        replies = [reply.id for reply in session.replies() if reply.output is not None]
    assert [len(own) for own in ids.values()] == [65, 65]
    for own in ids.values():
        assert own == sorted(own)
    assert replies == sorted(ids["a"] + ids["b"])


def test_an_id_of_somebody_else_among_ones_own_is_an_error(client, raw, streams):
    session = client.open()
    session._last = EntryId(2**50, 0)
    raw.add(session.id, f"{2**50}-2", "op", "reset")
    with pytest.raises(OutOfOrder, match=rf"{session.id}.*\[0, 1\].*refused.*one producer"):
        session.push_many(streams["s0"][:4])
    session.close()


def test_a_close_among_the_frames_is_no_error(client, raw, streams):
    session = client.open()
    wait_until(lambda: raw.row(session.id).get("status") == b"live", 10, "it is open")
    session._last = EntryId(2**50, 0)
    raw.redis.hset(raw.key("slot", session.id), "status", "closing")
    raw.add(session.id, f"{2**50}-2", "op", "close")
    assert len(session.push_many(streams["s0"][:4])) == 4
    replies = list(session.replies())
    assert replies[-1].reason == "close"
    assert replies[-1].output is None
