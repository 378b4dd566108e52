"""Redis Cluster: partitions on several servers, slots that move, a primary that dies."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import redis
from click.testing import CliRunner
from redis.exceptions import AskError, TryAgainError

import cluster as cluster_module
from cluster import Cluster, Producer, Server, assert_same, names_over
from conftest import ThreadedWorker, streams_of, wait_until
from serving_models import served
from slotstream import Client, EntryId
from slotstream.cli import cli
from slotstream.embedded import EmbeddedRedis
from slotstream.endpoint import Endpoint, hash_slot, passes
from slotstream.lines import Line
from slotstream.names import Keys, partition_of
from slotstream.operating import (
    drain_worker,
    rebalance_workers,
    sessions_aside,
    workers_of,
)
from slotstream.slottable import read_table
from slotstream_worker.store.table import Answer, Checkpoint, Commit, SlotTable

PARTITIONS = 16

pytestmark = pytest.mark.skipif(
    cluster_module.server_version() < (7,),
    reason="a half-moved slot and a failover are told apart by Redis 7",
)


@pytest.fixture(scope="module")
def model() -> Any:
    return served()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def calm(model: Any) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """The same streams through one Redis, and a worker that nothing happens to."""
    with EmbeddedRedis() as server:
        worker = ThreadedWorker(server.url, model, slots=64).start()

        def run(streams: dict[str, Any]) -> Any:
            with Client(server.url) as client:
                return client.run(streams)

        yield run
        worker.drain()


@pytest.fixture
def worker_at(model: Any) -> Iterator[Callable[..., ThreadedWorker]]:
    started: list[ThreadedWorker] = []

    def start(url: str, **settings: Any) -> ThreadedWorker:
        settings = {"slots": 64, "partition_count": PARTITIONS, **settings}
        started.append(ThreadedWorker(url, model, **settings).start())
        return started[-1]

    yield start
    for worker in started:
        if worker.thread.is_alive():
            worker.drain()


def spread_streams(model: Any, sessions: int, frames: int, seed: int) -> dict[str, Any]:
    streams = streams_of(sessions, frames, model.frame_shape, seed=seed)
    return dict(zip(names_over(sessions, PARTITIONS), streams.values(), strict=True))


def servers_of(cluster: Cluster, app: str) -> dict[int, Server]:
    """The server of each of the app's partitions."""
    return {p: cluster.owner(hash_slot(Keys(app, p).control)) for p in range(PARTITIONS)}


def test_sessions_over_all_partitions_equal_a_run_on_one_redis(cluster, worker_at, calm, model):
    streams = spread_streams(model, 48, 12, seed=1)
    workers = [worker_at(cluster.url, app="wide"), worker_at(cluster.url, app="wide")]
    assert set(servers_of(cluster, "wide").values()) == set(cluster.primaries)
    with Client(cluster.url, "wide") as client:
        replies = client.run(streams)
        assert [w.sessions for w in workers_of(client.app)] == [0, 0]
    assert_same(replies, calm(streams))
    assert min(w.worker.metrics.replies._value.get() for w in workers) > 0


def test_what_an_operator_and_a_producer_ask_of_an_app_works_across_servers(
    cluster, worker_at, calm, model
):
    streams = spread_streams(model, 48, 6, seed=2)
    got: dict[str, list[Any]] = {name: [] for name in streams}
    first = worker_at(cluster.url, app="asked")
    with Client(cluster.url, "asked", patience_s=10) as client:
        sessions = client.open_many(list(streams))

        def push(numbers: range) -> None:
            for session in sessions:
                for k in numbers:
                    session.push(streams[session.id][k])
            for session in sessions:
                got[session.id] += session.replies(20)

        push(range(2))
        table = read_table(client.app)
        assert [row["session"] for row in table] == sorted(streams)
        assert all(row["partition"] == partition_of(row["session"], 16) for row in table)
        assert {(row["status"], row["owner"]) for row in table} == {
            ("live", first.worker.config.worker)
        }
        said = CliRunner().invoke(
            cli, ["sessions", "--redis", cluster.url, "--app", "asked", "--json"]
        )
        assert {json.loads(line)["session"] for line in said.output.splitlines()} == set(streams)
        assert [w.sessions for w in workers_of(client.app)] == [48]
        assert sessions_aside(client.app) == []

        second = worker_at(cluster.url, app="asked")
        assert "hands 24 of 48" in rebalance_workers(client.app)[0]
        wait_until(lambda: len(second.worker.host) >= 12, 20, "the second has been given some")
        push(range(2, 4))
        assert "handed on" in drain_worker(client.app, first.worker.config.worker, 20)
        push(range(4, 5))
        assert [w.sessions for w in workers_of(client.app)] == [48]
        drain_worker(client.app, second.worker.config.worker, 20)

        # Nobody serves: what is pushed now waits, and can be cancelled or closed.
        cut, shut, *rest = sessions
        wrong = cut.push(np.full(model.frame_shape, 9, np.float32))
        assert cut.cancel(wrong)
        assert not cut.cancel(wrong)
        for k in range(3):
            shut.push(streams[shut.id][k])
        shut.close()
        third = worker_at(cluster.url, app="asked")
        last = list(shut.replies(20))[-1]
        assert (last.reason, last.cancelled) == ("close", 3)
        for session in (cut, *rest):
            session.push(streams[session.id][5], end=True)
            got[session.id] += session.replies(20)
            assert session.closed.reason == "end"
        assert read_table(client.app) == []
        assert len(third.worker.host) == 0
    expected = calm(streams)
    for name in (shut.id,):
        del got[name], expected[name]
    assert_same(got, expected)


def test_slots_that_move_under_traffic_lose_repeat_and_change_nothing(
    cluster, worker_at, calm, model
):
    streams = spread_streams(model, 40, 60, seed=3)
    rng = random.Random(3)
    worker = worker_at(cluster.url, app="moving", checkpoint_interval_s=0.2)
    producer = Producer(cluster.url, "moving", streams, rate_hz=8)
    producer.start()
    wait_until(lambda: producer.counted > 80, 30, "traffic")
    slots = [hash_slot(Keys("moving", p).control) for p in range(PARTITIONS)]
    moves = keys = 0
    while producer.counted < 40 * 45:
        assert producer.is_alive(), producer.error
        slot = rng.choice(slots[:6])
        source = cluster.owner(slot)
        target = rng.choice([p for p in cluster.primaries if p is not source])
        if rng.random() < 0.5:
            # Slowly: everyone meets a slot whose keys lie on two servers.
            cluster.begin_move(slot, source, target)
            keys += cluster.move_keys(slot, source, target, rng.randint(1, 8))
            time.sleep(rng.random() * 0.3)
        keys += cluster.move_slot(slot, source, target)
        moves += 1
        time.sleep(rng.random() * 0.15)
    assert_same(producer.finish(), calm(streams))
    assert moves >= 6, "too few moves to mean anything"
    assert keys > 6 * moves
    assert worker.worker.metrics.reconnects._value.get() >= 4
    worker.drain()
    # No stream of frames is left of the sessions that have ended, nor anything of the worker.
    kinds = {key.split(":")[2] for key in cluster.all_keys() if key.startswith("{moving:")}
    assert kinds <= {"control", "out", "slot", "epoch"}


# The scripts' keys

_COMMAND = re.compile(r"^[\d.]+ \[\d+ (\S+)\] (.*)$")
_PART = re.compile(r'"((?:[^"\\]|\\.)*)"')
_NO_KEY = {"TIME"}


class Scenario:
    """A slot table's whole life, script after script, on one partition of a cluster."""

    def __init__(self, cluster: Cluster, app: str) -> None:
        self.keys = Keys(app, 0)
        self.endpoint = Endpoint(cluster.url)
        self.line = Line(self.endpoint.pool(self.keys.control))
        self.slot = hash_slot(self.keys.control)

    def table(self, worker: str, max_attempts: int = 3) -> SlotTable:
        self.line.call("SET", self.keys.lease(worker), "here", "PX", 600_000)
        return SlotTable(
            self.line, self.keys, worker, reply_ttl_s=60, retention=100,
            max_attempts=max_attempts, declares=True,
        )  # fmt: skip

    def control(self, op: str, *sessions: str) -> list[tuple[bytes, str]]:
        return [
            (self.line.call("XADD", self.keys.control, "*", "op", op, "session", s), s)
            for s in sessions
        ]

    def frame(self, session: str, entry: str) -> None:
        self.line.call("XADD", self.keys.inbox(session), entry, "frame", "x")

    def answers(self, *ids: str) -> list[Answer]:
        return [Answer(EntryId.parse(i), ("output", b"y")) for i in ids]

    def close(self) -> None:
        self.line.close()
        self.endpoint.close()


def test_every_script_touches_only_keys_that_it_has_declared(cluster):
    at = Scenario(cluster, "declared")
    # The app's configuration, which the command and the client look up.
    with Client(cluster.url, "declared") as client:
        client.link.call("HSET", "declared:config", "partitions", 1, "frame", 4, "sample_shape",
                         "[6]", "dtype", "float32")  # fmt: skip
        server = cluster.owner(at.slot)
        watching = redis.Redis(port=server.port, protocol=2, socket_timeout=5)
        with watching.monitor() as monitor:
            _a_whole_life(at, client, cluster.url)
            at.line.call("ECHO", "@@over@@")
            lines: list[str] = []
            while "@@over@@" not in (lines[-1:] or [""])[0]:
                lines.append(monitor.connection.read_response().decode("latin-1"))
        watching.close()
    at.close()

    declared: set[str] = set()
    touched: dict[str, set[str]] = {}
    for line in lines:
        source, rest = _COMMAND.match(line).groups()
        parts = _PART.findall(rest)
        command = parts[0].upper()
        if source != "lua":
            declared = set()
            if command in ("EVAL", "EVALSHA"):
                declared = set(parts[3 : 3 + int(parts[2])])
        elif command not in _NO_KEY:
            count = {"DEL": len(parts), "RENAME": 2}.get(command, 1)
            first = 2 if command == "XINFO" else 1
            for key in parts[first : first + count]:
                assert key in declared, f"{command} {key}: not among the keys of its script"
                kind = key.removeprefix(at.keys.prefix).split(":")[0]
                touched.setdefault(kind, set()).add(command)
    assert set(touched) >= {
        *("slot", "in", "out", "aside", "aside-in", "waiting", "sessions", "aside"),
        *("workers", "owned", "lease", "epoch", "control"),
    }
    assert sum(map(len, touched.values())) > 25, "too little has run to mean anything"


def _a_whole_life(at: Scenario, client: Client, url: str) -> None:
    """Every script, and every way through each that touches another key."""
    one, two = at.table("one.1"), at.table("two.1")
    names = ["a", "b", "c", "d", "e", "f", "g"]
    entries = at.control("open", *names, "gone")
    assert one.apply_control(entries) == (8, 0)
    assert one.apply_control(at.control("close", "gone")) == (1, 0)  # while it waits
    rows = {row.session: row for row in one.claim(names)}
    assert len(rows) == 7
    for session in names:
        for k in range(1, 4):
            at.frame(session, f"{k}-0")

    def commit(session: str, *ids: str, base: str = "0-0", **settings: Any) -> str:
        row = rows[session]
        (result,) = one.commit([
            Commit(session, row.epoch, row.cuts, EntryId.parse(base), at.answers(*ids), **settings)
        ])  # fmt: skip
        return result

    saved = Checkpoint(b"state", "layout", "weights")
    assert commit("a", "1-0", "2-0", checkpoint=saved) == "ok"
    assert commit("a", "3-0", base="2-0", action="end", reason="end") == "ok"
    assert commit("b", "1-0", action="handback") == "ok"
    assert commit("c", "1-0") == "ok"
    assert commit("c", base="1-0", action="end", reason="idle") == "busy"
    assert commit("d", action="end", reason="close") == "ok"
    assert one.begin_trial("c", rows["c"].epoch, rows["c"].cuts)
    assert client.app.cancel("c", EntryId.parse("3-0"))
    assert one.apply_control(at.control("close", "e")) == (1, 0)  # while it is live
    assert len(one.take([b"f"], "one.1", "self", 5).rows) == 1
    assert one.forget({"never": EntryId.parse("4-0")}) == 1

    # Its owner dies again and again: taken, put back, closed, set aside, and tried once more.
    at.line.call("DEL", at.keys.lease("one.1"))
    taken = two.take([b"c", b"e", b"f", b"g"], "one.1", "dead", 2)
    assert (len(taken.rows), taken.put_back, taken.closed) == (2, 1, 1)
    three = at.table("three.1", max_attempts=2)
    owned = two.owned()
    at.line.call("DEL", at.keys.lease("two.1"))
    assert three.take(owned, "two.1", "dead", 5).set_aside >= 1
    (aside, *_) = sessions_aside(client.app)
    said = CliRunner().invoke(cli, ["retry", aside.session, "--redis", url, "--app", "declared"])
    assert said.exit_code == 0, said.output
    waits = [raw.decode() for raw in at.line.call("ZRANGE", at.keys.waiting, 0, -1)]
    at.line.call("HSET", at.keys.row(waits[0]), "attempts", 9)
    three.claim(waits)  # sets the first aside


@pytest.mark.parametrize("moved", ["row", "rest"])
def test_a_script_in_a_slot_that_is_half_moved_is_refused_and_changes_nothing(cluster, moved):
    at = Scenario(cluster, f"half-{moved}")
    table = at.table("one.1")
    table.apply_control(at.control("open", "live", "new"))
    (row,) = table.claim(["live"])
    at.frame("live", "1-0")
    entries = at.control("close", "live")
    source = cluster.owner(at.slot)
    target = next(p for p in cluster.primaries if p is not source)
    keys = source.call("CLUSTER", "GETKEYSINSLOT", at.slot, 100)
    cluster.begin_move(at.slot, source, target)
    cluster.move_named(source, target, *[k for k in keys if (":slot:" in k) == (moved == "row")])
    before = _contents(at, source), _contents(at, target)
    assert before[0]
    assert before[1]
    endpoint = Endpoint(f"redis://127.0.0.1:{target.port}")
    there = Line(endpoint.pool(""))
    moved_table = SlotTable(
        there, at.keys, "one.1", reply_ttl_s=60, retention=9, max_attempts=3, declares=True
    )
    commit = Commit("live", row.epoch, row.cuts, row.done, at.answers("1-0"),
                    Checkpoint(b"s", "l", "w"))  # fmt: skip
    acts: list[Callable[[SlotTable], Any]] = [
        lambda t: t.apply_control(entries),
        lambda t: t.claim(["new"]),
        lambda t: t.commit([commit]),
        lambda t: t.take([b"live"], "one.1", "self", 4),
        lambda t: t.take([], "old.1", "dead", 4),
        lambda t: t.begin_trial("live", row.epoch, row.cuts),
        lambda t: t.forget({"live": EntryId.parse("1-0")}),
    ]
    for act in acts:
        # Not an error of the script's own, which would have begun: these come before it runs.
        with pytest.raises((AskError, TryAgainError)) as no:
            act(table)
        assert passes(no.value)
        there.call("ASKING")  # as a client does that follows where it is sent
        with pytest.raises((AskError, TryAgainError)) as no:
            act(moved_table)
        assert passes(no.value)
    with Client(cluster.url, at.keys.app, patience_s=0.1) as client:
        client.app._partitions = 1  # no worker has told
        with pytest.raises((AskError, TryAgainError)):
            client.app.cancel("live", EntryId.parse("1-0"))
    assert (_contents(at, source), _contents(at, target)) == before
    cluster.move_slot(at.slot, source, target)
    assert moved_table.begin_trial("live", row.epoch, row.cuts)
    assert moved_table.commit([commit]) == ["ok"]
    assert moved_table.apply_control(entries) == (1, 0)
    there.close()
    endpoint.close()
    at.close()


def _contents(at: Scenario, server: Server) -> dict[str, bytes]:
    """All of the partition's keys on one server, as they are stored."""
    found = {}
    with redis.Redis(port=server.port, protocol=2) as client:
        for key in client.keys(at.keys.prefix + "*"):
            pipeline = client.pipeline(transaction=False)
            pipeline.execute_command("ASKING")
            pipeline.execute_command("DUMP", key)
            found[key.decode()] = pipeline.execute()[1]
    return found


# A primary that dies


def test_a_primary_whose_replica_takes_over_loses_nothing_that_was_acknowledged(
    worker_at, calm, model
):
    """With `min-replicas-to-write 1`, and a replica that has all that was acknowledged.

    The setting alone leaves a window: a primary acknowledges before its replica has the write
    (`settle` closes it here), and only refuses to go on without a replica that keeps up.
    """
    streams = spread_streams(model, 32, 50, seed=4)
    with Cluster(replicas=True, options={"min-replicas-to-write": 1}) as cluster:
        worker = worker_at(cluster.url, app="dying", checkpoint_interval_s=0.3, lease_s=4.0)
        homes = servers_of(cluster, "dying")
        producer = Producer(cluster.url, "dying", streams, rate_hz=8)
        producer.start()
        wait_until(lambda: producer.counted > 32 * 8, 30, "traffic")
        # Not the server that the URL names only: whichever of them dies, the others say who is.
        victim = cluster.primaries[0]
        assert victim in homes.values()
        promoted = cluster.fail_over(victim, settled=True)
        with pytest.raises(redis.ResponseError, match="NOREPLICAS"):
            wait_until(
                lambda: promoted.call("DEL", _key_in(promoted, cluster)) == "never", 10, "refused"
            )
        assert producer.is_alive()
        victim.start()  # comes back as the replica, and the writes go through
        assert_same(producer.finish(), calm(streams))
        assert worker.worker.metrics.reconnects._value.get() > 0
        assert worker.worker.metrics.lost._value.get() == 0
        worker.drain()


def _key_in(server: Server, cluster: Cluster) -> str:
    """A key that nobody uses, in one of the server's slots."""
    return next(
        key for k in itertools.count() if cluster.owner(hash_slot(key := f"nobody-{k}")) is server
    )


def test_without_a_replica_that_keeps_up_frames_are_lost_but_no_reply_comes_twice(
    worker_at, calm, model
):
    """What holds where Redis forgets what it had acknowledged: order, single replies, others.

    Frames that were acknowledged can be gone, and the session goes on without them, so its
    outputs are those of a stream with a gap. Sessions on the other servers notice nothing.
    """
    streams = spread_streams(model, 32, 50, seed=5)
    with Cluster(replicas=True) as cluster:
        worker = worker_at(cluster.url, app="losing", checkpoint_interval_s=0.3, lease_s=4.0)
        homes = servers_of(cluster, "losing")
        producer = Producer(cluster.url, "losing", streams, rate_hz=8, window=64)
        producer.start()
        wait_until(lambda: producer.counted > 32 * 8, 30, "traffic")
        victim = next(p for p in cluster.primaries if p in homes.values())
        replica = cluster.replicas[cluster.primaries.index(victim)]
        replica.call("CONFIG", "SET", "masteruser", "nobody", "masterauth", "wrong")
        victim.call("CLIENT", "KILL", "TYPE", "replica")
        counted = producer.counted
        wait_until(lambda: producer.counted > counted + 32 * 6, 30, "replies that will be lost")
        cluster.fail_over(victim, settled=False)
        replies, expected = producer.finish(), calm(streams)
        hit = [s for s in streams if homes[partition_of(s, PARTITIONS)] is victim]
        others = [s for s in streams if s not in hit]
        assert hit
        assert others
        assert_same(replies, expected, others)
        gaps = 0
        for name in hit:
            ids = [reply.id for reply in replies[name]]
            assert ids == sorted(set(ids)), f"{name}: twice or out of order"
            assert not any(reply.error for reply in replies[name])
            assert replies[name][-1].end
            gaps += any(
                not np.array_equal(a.output["scores"], b.output["scores"])
                for a, b in zip(replies[name], expected[name], strict=False)
            )
        assert gaps, "nothing was lost: then this test says nothing"
        worker.drain()


# Who is asked where the keys are


def test_of_a_batch_only_what_was_not_answered_is_sent_again(cluster):
    """Not what another server has taken already, while a slot of this one moves."""
    keys = [Keys("batch", p).control for p in range(PARTITIONS)]
    moves = hash_slot(keys[0])
    source = cluster.owner(moves)
    target = next(p for p in cluster.primaries if p is not source)
    with Client(cluster.url, "batch") as client:
        cluster.begin_move(moves, source, target)  # a key that is not there is sent elsewhere
        done: dict[int, Any] = {}
        commands = [("XADD", key, "*", "op", "none") for key in keys]
        for _ in range(3):
            with pytest.raises(AskError):
                client.link.try_calls(commands, done)
        assert set(done) == set(range(1, PARTITIONS))
        cluster.end_move(moves, source, target)
        writing = threading.Thread(target=lambda: client.link.calls(commands[:1]))
        writing.start()
        writing.join(10)
        assert [client.link.call("XLEN", key) for key in keys] == [1] * PARTITIONS


def test_a_session_closed_before_any_worker_has_seen_it_ends_for_its_reader(cluster, worker_at):
    worker_at(cluster.url, app="early").drain()
    with Client(cluster.url, "early") as client:
        session = client.open()
        session.close()
        worker_at(cluster.url, app="early")
        (last,) = session.replies(10)
        assert (last.reason, last.cancelled) == ("close", 0)


def test_a_node_that_has_been_cut_off_is_not_asked_again_and_again(monkeypatch):
    """One that the others have given up answers still, and names itself."""
    said = {7001: [0, 16383, [b"127.0.0.1", 7001]], 7002: [0, 16383, [None, 7002]]}
    asked = []

    def answer(pool: Any, *_: str) -> Any:
        asked.append(pool.connection_kwargs["port"])
        return [said[asked[-1]]]

    monkeypatch.setattr("slotstream.endpoint._ask", answer)
    endpoint = Endpoint("redis+cluster://127.0.0.1:7001")
    endpoint._at(("127.0.0.1", 7001))
    endpoint._at(("127.0.0.1", 7002))
    found = set()
    for _ in range(4):
        found.add(endpoint.pool("x").connection_kwargs["port"])
        endpoint.forget()
    assert found == {7001, 7002}
    assert set(asked) == {7001, 7002}


def test_a_line_can_be_opened_anew_as_often_as_it_breaks(cluster):
    """The client library's pool counts them all, and refuses some hundred in its newer versions."""
    endpoint = Endpoint(cluster.url)
    for _ in range(400):
        line = Line(endpoint.pool("x"))
        line.close()
    assert endpoint.pool("x").max_connections > 10**9
    endpoint.close()
