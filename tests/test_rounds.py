"""Rounds: how long they wait for company, how deep they go, and that no session can tell."""

from __future__ import annotations

import time

import numpy as np
import pytest

from conftest import streams_of, wait_until
from serving_models import direct, served
from slotstream import Client
from slotstream_worker.config import WorkerConfig
from slotstream_worker.engine import catchup
from slotstream_worker.engine.catchup import CatchUp
from slotstream_worker.engine.engine import Engine
from slotstream_worker.store.inbox import Portions
from slotstream_worker.worker import Worker


@pytest.fixture(scope="module")
def model():
    return served()


def counted(worker, name):
    return getattr(worker.worker.metrics, name)._value.get()


def test_a_round_waits_for_company_as_long_as_it_is_told(redis_url, thread_worker, model):
    worker = thread_worker(model, round_wait_s=2.0)
    frames = streams_of(3, 2, model.frame_shape, seed=5)
    with Client(redis_url) as client:
        sessions = [client.open(name) for name in frames]
        # A round waits for no more sessions than are hosted.
        wait_until(lambda: len(worker.worker.host) == 3, 10, "all are hosted")
        for session, stream in zip(sessions, frames.values(), strict=True):
            session.push(stream[0])
            time.sleep(0.1)
        for session in sessions:
            assert next(session.replies(10)).error is None
        assert counted(worker, "rounds") == 1
        assert counted(worker, "frames") == 3
        # One alone waits the whole time, and no longer.
        began = time.monotonic()
        sessions[0].push(frames["s0"][1])
        assert next(sessions[0].replies(10)).error is None
        assert 2.0 <= time.monotonic() - began < 8


def test_a_round_that_has_its_rows_waits_no_longer(redis_url, thread_worker, model):
    worker = thread_worker(model, round_wait_s=30.0, round_rows=2)
    frames = streams_of(3, 1, model.frame_shape, seed=6)
    with Client(redis_url) as client:
        sessions = [client.open(name) for name in frames]
        wait_until(lambda: len(worker.worker.host) == 3, 10, "all are hosted")
        began = time.monotonic()
        for session, stream in list(zip(sessions, frames.values(), strict=True))[:2]:
            session.push(stream[0])
        for session in sessions[:2]:
            assert next(session.replies(10)).error is None
        assert time.monotonic() - began < 10


def test_a_backlog_is_caught_up_several_frames_a_launch_in_the_same_bits(redis_url, model):
    streams = streams_of(6, 40, model.frame_shape, seed=7)
    config = WorkerConfig(redis=redis_url, slots=8, row_counts=(4,), max_sessions=8)
    worker = Worker(config, model)
    worker.prepare()
    assert worker.engine.catch_up == [CatchUp(4, catchup.FRAMES)]
    deep = []
    begin_far = worker.engine.begin_far
    worker.engine.begin_far = lambda names, frames, *rest: (
        deep.append(frames.shape[:2]) or begin_far(names, frames, *rest)
    )
    with Client(redis_url, window=64) as client:
        sessions = client.open_many(list(streams))
        for session, stream in zip(sessions, streams.values(), strict=True):
            session.push_many(stream)
        wait_until(
            lambda: worker.turn() or worker.metrics.replies._value.get() == 240, 60, "all replies"
        )
        replies = {s.id: [r.output for r in s.replies(10)] for s in sessions}
    worker.drain()
    worker.close()
    assert sum(rows * frames for rows, frames in deep) > 60, "much of it was caught up"
    assert max(frames for _, frames in deep) > 4
    calm = Engine(model, 8)
    calm.prepare((4,))
    calm.pool.admit(streams)
    for k in range(40):
        (ran, *more) = calm.run(list(streams), np.stack([s[k] for s in streams.values()]))
        for launch in (ran, *more):
            for name, session in enumerate(launch.sessions):
                for key, array in launch.outputs.items():
                    np.testing.assert_array_equal(replies[session][k][key], array[name])


def test_a_session_without_a_backlog_is_not_passed_over_for_those_that_have_one(redis_url, model):
    streams = streams_of(17, 320, model.frame_shape, seed=9)
    config = WorkerConfig(redis=redis_url, slots=20, row_counts=(4,), max_sessions=20)
    worker = Worker(config, model)
    worker.prepare()
    with Client(redis_url, window=400) as client:
        sessions = client.open_many(list(streams))
        live = sessions.pop()
        client.push_many({s: streams[s.id] for s in sessions})
        before = []
        for frame in streams[live.id][:6]:
            live.push(frame)
            length = client.redis.xlen(live.outbox)
            behind = worker.metrics.replies._value.get()
            wait_until(
                lambda n=length: worker.turn() or client.redis.xlen(live.outbox) > n, 20, "a reply"
            )
            before.append(worker.metrics.replies._value.get() - behind)
        # All others may run once before it, two rounds be under way, and one wave be on its way.
        assert max(before) < 2 * len(sessions) * catchup.FRAMES
        assert client.redis.xlen(sessions[0].outbox) < 321, "the backlog is not over"
    worker.drain()
    worker.close()


def test_a_frame_that_is_none_in_the_middle_of_a_backlog_is_answered_alone(redis_url, model):
    """Its session leaves the deep launch and goes frame by frame; the others notice nothing."""
    streams = streams_of(4, 12, model.frame_shape, seed=8)
    config = WorkerConfig(redis=redis_url, slots=8, row_counts=(4,), max_sessions=8)
    worker = Worker(config, model)
    worker.prepare()
    with Client(redis_url, window=64) as client:
        sessions = client.open_many(list(streams))
        for session, stream in zip(sessions, streams.values(), strict=True):
            for k, frame in enumerate(stream):
                raw = client.app.encode(frame)
                if session.id == "s1" and k == 6:
                    raw = b"x" * len(raw)
                client.redis.xadd(session.inbox, {"frame": raw})
        wait_until(
            lambda: worker.turn() or worker.metrics.replies._value.get() == 48, 60, "all replies"
        )
        replies = {s.id: client.redis.xrange(s.outbox)[1:] for s in sessions}
    worker.drain()
    worker.close()
    errors = [(name, k) for name, got in replies.items() for k, (_, r) in enumerate(got)
              if b"error" in r]  # fmt: skip
    assert errors == [("s1", 6)]
    assert [len(got) for got in replies.values()] == [12] * 4


@pytest.mark.parametrize("settings", [{"round_wait_s": -0.1}, {"round_rows": -1}])
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match="0 or more"):
        WorkerConfig(**settings)


@pytest.mark.parametrize("seed", range(10))
def test_a_read_names_many_streams_of_few_entries_and_few_of_many(seed: int):
    rng = np.random.default_rng(seed)
    entry = int(rng.choice([0, 100, 1616, 300_000, 5_000_000]))
    portions = Portions(16, entry)

    def read(waiting: int) -> tuple[int, int]:
        """Read streams of each of which so many entries wait."""
        streams, count = portions.streams, portions.count
        assert 1 <= count <= 16
        assert 1 <= streams <= 512
        assert streams == 1 or streams * count * entry <= 2 * 2**20
        portions.found(streams * min(waiting, count), streams)
        return streams, count

    assert portions.count == 16, "a backlog is read at once"
    for _ in range(6):
        read(1)
    streams, count = read(1)
    assert count == 2
    assert streams == (max(1, min(512, 2**20 // entry)) if entry else 512)
    for _ in range(3):
        read(100)
    assert portions.count == 16
    for _ in range(200):
        read(int(rng.integers(1, 20)))


def test_a_backlog_after_quiet_times_is_answered_whole_and_in_order(redis_url, model):
    streams = streams_of(5, 60, model.frame_shape, seed=11)
    # No sweep finds what a read has left behind, and no trim of a stream tells of it.
    config = WorkerConfig(
        redis=redis_url,
        slots=8,
        row_counts=(4,),
        max_sessions=8,
        sweep_s=600.0,
        checkpoint_interval_s=600.0,
    )
    worker = Worker(config, model)
    worker.prepare()
    with Client(redis_url, window=64) as client:
        sessions = client.open_many(list(streams))
        answered = lambda n: worker.turn() or counted_of(worker) == n  # noqa: E731
        for k in range(10):
            for session in sessions:
                session.push(streams[session.id][k])
            wait_until(lambda k=k: answered(5 * (k + 1)), 20, "one frame of each")
        (shard,) = worker.shards
        assert shard._portions.count == 2
        for session in sessions:
            session.push_many(streams[session.id][10:])
        wait_until(lambda: answered(300), 60, "the backlog too")
        assert shard._portions.count > 2
        replies = {s.id: [r.output for r in s.replies(10)] for s in sessions}
    worker.drain()
    worker.close()
    for name, stream in streams.items():
        expected = direct(model, stream.reshape(-1, *model.sample_shape))
        for key, array in expected.items():
            found = np.concatenate([reply[key] for reply in replies[name]])
            np.testing.assert_allclose(found, array, rtol=1e-5, atol=1e-6)


def counted_of(worker: Worker) -> float:
    return worker.metrics.replies._value.get()
