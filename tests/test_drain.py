"""Draining on a bad day: what a worker hands back, and what it says where it cannot."""

from __future__ import annotations

import threading
import time

import pytest

from conftest import streams_of, wait_until
from serving_models import served
from slotstream import Client
from slotstream.embedded import EmbeddedRedis
from slotstream.names import Keys
from slotstream_worker.config import WorkerConfig
from slotstream_worker.worker import NotHandedBack, Worker

KEYS = Keys("slotstream")


@pytest.fixture(scope="module")
def model():
    return served()


@pytest.fixture
def redis_server():
    with EmbeddedRedis(append_only=True) as server:
        yield server


def test_a_drain_waits_for_a_redis_that_was_away_for_longer_than_a_lease_before_it_began(
    redis_server, redis_url, thread_worker, model
):
    worker = thread_worker(model, lease_s=1.0, sweep_s=0.3)
    frames = streams_of(1, 2, model.frame_shape)["s0"]
    with Client(redis_url) as client:
        session = client.open("arm")
        session.push(frames[0])
        assert next(session.replies(10)).error is None
        redis_server.kill()
        wait_until(lambda: worker.worker.shards[0].outage.lasts_s > 1.2, 10, "a long outage")
        worker.stop.set()
        time.sleep(0.2)
        redis_server.start()
        worker.drain()
        status, state = client.redis.hmget(KEYS.row("arm"), "status", "state")
        assert status == b"waiting"
        assert len(state) == model.spec.row_bytes
        assert client.redis.exists(KEYS.lease(worker.worker.config.worker)) == 0
        # And whoever comes next goes on from there.
        thread_worker(model)
        session.push(frames[1])
        assert next(session.replies(10)).error is None


def test_a_drain_that_cannot_reach_redis_for_a_lease_gives_up_and_says_so(
    redis_server, redis_url, worker_process
):
    process = worker_process("--lease", "1").wait_ready()
    with Client(redis_url) as client:
        session = client.open("arm")
        session.push(streams_of(1, 1, (4, 6))["s0"][0])
        assert next(session.replies(10)).error is None
    redis_server.kill()
    assert process.terminate() == 1
    assert "1 sessions could not be handed back" in process.text
    assert "Traceback" not in process.text
    redis_server.start()


def test_a_session_that_was_to_end_for_idleness_and_is_not_idle_any_more_is_handed_back(
    redis_server, redis_url, model
):
    config = WorkerConfig(redis=redis_url, slots=4, row_counts=(4,), max_sessions=4)
    worker = Worker(config, model)
    worker.prepare()
    frames = streams_of(1, 2, model.frame_shape)["s0"]
    with Client(redis_url) as client:
        session = client.open("arm")
        session.push(frames[0])
        wait_until(
            lambda: worker.turn() or client.redis.xlen(KEYS.outbox("arm")) == 2, 10, "served"
        )
        (hosted,) = worker.shards[0].hosted.values()
        worker.host.finish(hosted, "end", "idle")
        session.push(frames[1])
        draining = threading.Thread(target=worker.drain, daemon=True)
        draining.start()
        draining.join(10)
        assert not draining.is_alive(), "the drain goes on for ever"
        assert client.redis.hget(KEYS.row("arm"), "status") == b"waiting"
        assert client.redis.xlen(KEYS.inbox("arm")) == 1
    worker.close()


def test_a_drain_that_gives_up_raises_what_the_command_knows(redis_server, redis_url, model):
    config = WorkerConfig(redis=redis_url, slots=4, row_counts=(4,), max_sessions=4, lease_s=0.6)
    worker = Worker(config, model)
    worker.prepare()
    redis_server.kill()
    with pytest.raises(NotHandedBack, match=r"could not be reached for 0\.[6-9]|for [1-9]"):
        worker.drain()
    worker.close()
    redis_server.start()
