"""More sessions than slots, idle ones, several partitions, several workers."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from conftest import streams_of, wait_until
from serving_models import served
from slotstream import Client
from slotstream.names import Keys, partition_of
from slotstream_worker.config import WorkerConfig
from slotstream_worker.engine.engine import Engine
from slotstream_worker.engine.errors import PoolFull
from slotstream_worker.engine.pool import Pool
from slotstream_worker.engine.rows import Rows
from slotstream_worker.worker import Worker


@pytest.fixture(scope="module")
def model():
    return served()


def calm_run(redis_url, thread_worker, model, streams):
    """The streams with a slot for each, through a worker that nothing happens to."""
    thread_worker(model, app="calm", slots=len(streams))
    with Client(redis_url, "calm") as client:
        return client.run(streams)


def assert_same_bits(replies, expected):
    assert replies.keys() == expected.keys()
    for name, calm in expected.items():
        assert [r.error for r in replies[name]] == [None] * len(calm)
        for a, b in zip(replies[name], calm, strict=True):
            for key in b.output:
                np.testing.assert_array_equal(a.output[key], b.output[key])


def test_parked_rows_come_back_bit_for_bit(model):
    engine = Engine(model, 3)
    engine.prepare((4,))
    rows, rng = Rows(engine.pool), np.random.default_rng(0)
    size = engine.pool.slot_bytes
    truth = {f"s{k}": b"" if k == 2 else rng.bytes(size) for k in range(9)}
    rows.hold(truth)
    for _ in range(40):
        some = [str(s) for s in rng.choice(sorted(truth), rng.integers(1, 4), replace=False)]
        rows.seat(some)
        assert all(s in engine.pool for s in some)
        if rng.random() < 0.3:  # a row that changes while it is seated
            truth[some[0]] = rng.bytes(size)
            engine.pool.write({some[0]: truth[some[0]]})
        if rng.random() < 0.1:
            victim = str(rng.choice(sorted(truth)))
            rows.reset(victim)
            truth[victim] = b""
        names = sorted(truth)
        assert dict(zip(names, rows.read(names), strict=True)) == truth
    rows.seat(["s0", "s1", "s2"])
    with pytest.raises(PoolFull):
        rows.seat(["s0", "s1", "s2", "s3"])
    rows.drop(["s0", "s8"])
    assert len(rows) == 7
    assert "s8" not in rows


def test_the_least_recently_used_row_is_the_one_parked(model):
    pool = Engine(model, 2).pool
    rows = Rows(pool)
    rows.hold({"a": b"", "b": b"", "c": b""})
    rows.seat(["a", "b"])
    rows.seat(["a"])
    rows.seat(["c"])
    assert "b" not in pool
    assert {"a", "c"} == set(pool.sessions)
    assert rows.parked == 1


def test_more_sessions_than_slots_are_served_as_if_each_had_one(
    client, redis_url, thread_worker, model
):
    streams = streams_of(20, 12, model.frame_shape, seed=1)
    worker = thread_worker(model, slots=4, max_sessions=20)
    replies = client.run(streams)
    assert worker.worker.metrics.rounds._value.get() >= 20 * 12 / 4
    assert_same_bits(replies, calm_run(redis_url, thread_worker, model, streams))


def test_rounds_rotate_so_that_nobody_starves(client, redis_url, thread_worker, model, caplog):
    thread_worker(model, slots=2, max_sessions=8, read_ahead=64)
    streams = streams_of(8, 40, model.frame_shape, seed=2)
    sessions = client.open_many(sorted(streams), new=True)
    for frames in zip(*(streams[s.id] for s in sessions), strict=True):
        for session, frame in zip(sessions, frames, strict=True):
            session.push(frame)
    behind = []
    for _ in range(200):
        lengths = [client.redis.xlen(s.outbox) for s in sessions]
        behind.append(max(lengths) - min(lengths))
        if min(lengths) > 40:
            break
        time.sleep(0.005)
    # Each waits for the other three pairs at most, and for who was read first.
    assert max(behind) <= 24
    assert all(len(list(s.replies(20))) == 40 for s in sessions)
    assert not [r for r in caplog.records if r.levelname == "ERROR"], "a round had no slots"


def test_rows_of_a_round_under_way_keep_their_slots(model):
    pool = Pool(model.spec, 2)
    rows = Rows(pool)
    rows.hold({"a": b"", "b": b"", "c": b"\1" * model.spec.row_bytes})
    rows.seat(["a", "b"])
    with pytest.raises(PoolFull, match="under way"):
        rows.seat(["c"], lambda session: session in "ab")
    assert set(pool.sessions) == {"a", "b"}
    rows.seat(["c"], lambda session: session == "a")
    assert set(pool.sessions) == {"a", "c"}
    assert rows.read(["c"]) == [b"\1" * model.spec.row_bytes]


def test_an_idle_session_is_closed_with_the_reason_and_a_busy_one_is_not(
    client, thread_worker, model
):
    thread_worker(model, idle_timeout_s=0.8, sweep_s=0.2)
    idle, busy = client.open("idle"), client.open("busy")
    frames = streams_of(1, 30, model.frame_shape)["s0"]
    idle.push(frames[0])
    for frame in frames:
        busy.push(frame)
        assert next(busy.replies(10)).error is None
        time.sleep(0.08)
    last = list(idle.replies(10))
    if not idle.closed:
        idle.close()
        last = list(idle.replies(10))
    assert idle.closed.reason == "idle"
    assert idle.closed.cancelled == 0
    assert last
    assert busy.closed is None


@pytest.mark.parametrize("read_first", [True, False])
def test_a_frame_that_comes_as_its_session_is_to_end_idle_is_answered(
    redis_url, client, model, read_first
):
    """Its entry is on its way, or already read and left out, when the session counts as idle."""
    config = WorkerConfig(redis=redis_url, slots=8, row_counts=(4,), max_sessions=8,
                          idle_timeout_s=0.1, sweep_s=0.02)  # fmt: skip
    worker = Worker(config, model)
    worker.prepare()
    frames = streams_of(1, 2, model.frame_shape)["s0"]
    session = client.open("s")
    session.push(frames[0])
    length = lambda: worker.turn() or client.redis.xlen(session.outbox)  # noqa: E731
    wait_until(lambda: length() == 2, 10, "it has been answered")
    (shard,) = worker.shards
    wait_until(lambda: worker.turn() or shard._sweep._left, 10, "it is to be compared next")
    time.sleep(0.2)
    session.push(frames[1])
    if read_first:  # its entry comes from Redis after it was found idle, before that is refused
        hosted = worker.host.hosted["s"]
        worker.host.finish(hosted, "end", "idle")
        ((id_, fields),) = client.redis.xrange(session.inbox, f"({hosted.read_to.decode()}", "+")
        worker.host.feed(hosted, [[id_, [b"frame", fields[b"frame"]]]])
    wait_until(lambda: length() == 3, 10, "the frame is answered")
    wait_until(lambda: length() == 4, 10, "and then it ends")
    last = list(session.replies(10))[-1]
    assert (last.reason, session.closed.cancelled) == ("idle", 0)
    worker.drain()
    worker.close()


def test_sessions_of_several_partitions_are_served_by_workers_of_some_each(
    redis_url, thread_worker, model
):
    streams = streams_of(12, 10, model.frame_shape, seed=4)
    streams = {f"mic-{k}/left": stream for k, stream in enumerate(streams.values())}
    spread = {partition_of(name, 4) for name in streams}
    assert len(spread) >= 3
    one = thread_worker(model, app="parts", partition_count=4, partitions=frozenset({0, 1}))
    two = thread_worker(model, app="parts", partitions=frozenset({2, 3}))
    with Client(redis_url, "parts") as client:
        replies = client.run(streams)
        for name in streams:
            p = partition_of(name, 4)
            owner = one if p < 2 else two
            first = client.redis.xrange(Keys("parts", p).outbox(name), count=1)[0][1]
            assert first[b"worker"].decode() == owner.worker.config.worker
    assert_same_bits(replies, calm_run(redis_url, thread_worker, model, streams))


def test_waiting_sessions_are_claimed_when_a_worker_has_room(client, thread_worker, model):
    worker = thread_worker(model, slots=2, max_sessions=2)
    frame = streams_of(1, 1, model.frame_shape)["s0"][0]
    sessions = client.open_many([f"w{k}" for k in range(5)], new=True)
    for session in sessions:
        session.push(frame)
    keys = Keys("slotstream")
    wait_until(lambda: client.redis.zcard(keys.waiting) == 3, 10, "three wait")
    assert len(worker.worker.host) == 2
    closed = next(s for s in sessions if client.redis.zscore(keys.waiting, s.id) is not None)
    closed.close()  # obeyed though nobody has room
    last = list(closed.replies(10))[-1]
    assert (last.reason, last.cancelled) == ("close", 1)
    thread_worker(model, slots=2, max_sessions=2)
    for session in sessions:
        if session is not closed:
            session.end()
            assert [r.error for r in session.replies(20)] == [None, None]


def test_rebalance_evens_sessions_out_and_a_drained_worker_hands_everything_on(
    redis_url, thread_worker, worker_process, model
):
    from slotstream.operating import drain_worker, rebalance_workers, workers_of

    streams = streams_of(12, 150, model.frame_shape, seed=6)
    results = {}

    def produce() -> None:
        with Client(redis_url, window=4) as client:
            results.update(client.run(streams, rate_hz=12))

    first = thread_worker(model, slots=12)
    producer = threading.Thread(target=produce)
    producer.start()
    with Client(redis_url) as client:
        wait_until(lambda: len(first.worker.host) == 12, 20, "the first holds all")
        second = thread_worker(model, slots=12)
        assert "hands 6 of 12" in rebalance_workers(client.app)[0]
        wait_until(lambda: len(second.worker.host) == 6, 20, "the second holds half")
        assert [w.sessions for w in workers_of(client.app)] == [6, 6]
        said = drain_worker(client.app, first.worker.config.worker, 20)
        assert "6 sessions handed on" in said
        assert [w.id for w in workers_of(client.app)] == [second.worker.config.worker]
    producer.join(60)
    assert not producer.is_alive()
    assert_same_bits(results, calm_run(redis_url, thread_worker, model, streams))
    gaps = [r.latency_s for replies in results.values() for r in replies if r.latency_s]
    assert max(gaps) < 5


def test_workers_that_rebalance_by_themselves_even_out(client, redis_url, thread_worker, model):
    first = thread_worker(model, slots=12, sweep_s=0.3, rebalance=True)
    client.open_many([f"r{k}" for k in range(10)], new=True)
    wait_until(lambda: len(first.worker.host) == 10, 20, "the first holds all")
    second = thread_worker(model, slots=12, sweep_s=0.3, rebalance=True)
    wait_until(lambda: len(second.worker.host) >= 4, 20, "the second has taken its share")
    wait_until(lambda: len(first.worker.host) + len(second.worker.host) == 10, 20, "all are held")


def test_a_reply_counts_once_redis_has_taken_it(redis_url, client, model):
    worker = Worker(WorkerConfig(redis=redis_url, slots=4, row_counts=(4,)), model)
    worker.prepare()
    streams = streams_of(2, 2, model.frame_shape, seed=12)
    kept, lost = client.open_many(list(streams))
    metrics = worker.metrics
    for k, expected in enumerate((2, 3)):
        for session in (kept, lost):
            session.push(streams[session.id][k])
        wait_until(
            lambda k=k: worker.turn() or client.redis.xlen(kept.outbox) == k + 2, 10, "an answer"
        )
        wait_until(lambda k=k: worker.turn() or metrics.lost._value.get() == k, 10, "the other")
        assert metrics.replies._value.get() == expected
        client.redis.hset(Keys("slotstream").row(lost.id), "owner", "another-1")
    worker.drain()
    worker.close()
