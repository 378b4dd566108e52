"""A worker killed again and again: one reply a frame, none lost, none twice, in the same bits."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from conftest import streams_of, wait_until
from serving_models import served
from slotstream import Client
from slotstream.names import Keys

KILLS = 20
SESSIONS, FRAMES = 24, 250
SEED = 7


@pytest.fixture(scope="module")
def model():
    return served()


def undisturbed(redis_url, thread_worker, model, streams):
    """The same streams through a worker that nothing happens to."""
    thread_worker(model, app="undisturbed", slots=SESSIONS)
    with Client(redis_url, "undisturbed") as client:
        return client.run(streams)


def assert_same(replies, expected):
    for name, calm in expected.items():
        got = replies[name]
        ids = [r.id for r in got]
        assert len(got) == len(calm) == len(set(ids)), f"{name}: lost or twice"
        assert ids == sorted(ids)
        assert not any(r.error for r in got)
        for a, b in zip(got, calm, strict=True):
            for key in b.output:
                np.testing.assert_array_equal(a.output[key], b.output[key])
    spikes = np.concatenate([r.output["spikes"] for r in expected["s0"]])
    assert 0.02 < spikes.mean() < 0.98, "the neurons must be at work for this to mean anything"


@pytest.mark.crash
@pytest.mark.timeout(400)
def test_a_worker_killed_at_twenty_random_points_loses_and_repeats_nothing(
    redis_url, worker_process, thread_worker, model
):
    rng = random.Random(SEED)
    streams = streams_of(SESSIONS, FRAMES, model.frame_shape, seed=SEED)
    options = (
        "--name",
        "phoenix",
        "--slots",
        str(SESSIONS),
        "--checkpoint-interval",
        "0.2",
        "--lease",
        "2",
        "--sweep",
        "1",
    )
    counted, results = [0], {}

    def produce() -> None:
        with Client(redis_url, window=8) as client:
            results.update(client.run(streams, timeout_s=60, on_reply=lambda *_: count()))

    def count() -> None:
        counted[0] += 1

    producer = threading.Thread(target=produce)
    producer.start()
    rows = []
    keys = Keys("slotstream")
    with Client(redis_url) as watching:
        for kill in range(KILLS):
            process = worker_process(*options).wait_ready(kill + 1)
            least = counted[0] + rng.randint(1, SESSIONS * FRAMES // (KILLS + 5))
            wait_until(lambda least=least: counted[0] >= least, 60, "traffic")
            time.sleep(rng.random() * 0.01)
            process.kill()
            assert producer.is_alive(), "killed after the traffic had ended: not a crash in it"
            rows.append(watching.redis.hmget(keys.row("s0"), "cursor", "done", "count"))
    worker_process(*options).wait_ready(KILLS + 1)
    producer.join(120)
    assert not producer.is_alive()
    # Some kill must have come between a reply and its checkpoint, or no replay was tested.
    assert any(cursor != done for cursor, done, _ in rows)
    assert_same(results, undisturbed(redis_url, thread_worker, model, streams))


def test_without_a_name_the_sessions_are_taken_when_the_old_lease_has_ended(
    redis_url, worker_process, thread_worker, model
):
    streams = streams_of(6, 40, model.frame_shape, seed=3)
    options = ("--lease", "1", "--sweep", "0.5", "--checkpoint-interval", "30")
    results = {}

    def produce() -> None:
        with Client(redis_url, window=4) as client:
            results.update(client.run(streams, rate_hz=30))

    producer = threading.Thread(target=produce)
    first = worker_process(*options).wait_ready(1)
    producer.start()
    with Client(redis_url) as client:
        wait_until(lambda: client.redis.xlen("{slotstream:0}:out:s0") > 8, 30, "replies")
        first.kill()
        second = worker_process(*options).wait_ready(2)
        producer.join(60)
        assert not producer.is_alive()
        assert client.redis.smembers("{slotstream:0}:workers") != set()
    assert second.terminate() == 0
    assert_same(results, undisturbed(redis_url, thread_worker, model, streams))


def test_sigterm_drains_and_the_next_worker_goes_on_from_the_checkpoint(
    redis_url, worker_process, thread_worker, model
):
    streams = streams_of(8, 60, model.frame_shape, seed=5)
    results = {}

    def produce() -> None:
        with Client(redis_url, window=4) as client:
            results.update(client.run(streams, rate_hz=40))

    producer = threading.Thread(target=produce)
    first = worker_process("--checkpoint-interval", "30").wait_ready(1)
    producer.start()
    with Client(redis_url) as client:
        wait_until(lambda: client.redis.xlen("{slotstream:0}:out:s0") > 10, 30, "replies")
        assert first.terminate() == 0
        cursor, done, status = client.redis.hmget(
            "{slotstream:0}:slot:s0", "cursor", "done", "status"
        )
        assert cursor == done != b"0-0"
        assert status == b"waiting"
        assert client.redis.smembers("{slotstream:0}:workers") == set()
    worker_process().wait_ready(2)
    producer.join(60)
    assert not producer.is_alive()
    assert_same(results, undisturbed(redis_url, thread_worker, model, streams))


def test_a_newer_process_of_the_same_name_displaces_the_older_one(redis_url, worker_process):
    options = ("--name", "twin", "--sweep", "0.5")
    with Client(redis_url) as client:
        older = worker_process(*options).wait_ready(1)
        session = client.open("x")
        session.push(np.ones((4, 6), np.float32))
        assert len(list(session.replies(10))) == 1
        newer = worker_process(*options).wait_ready(2)
        session.push(np.full((4, 6), 0.5, np.float32))
        assert len(list(session.replies(20))) == 1
        assert older.process.wait(20) == 1
        assert "has taken this one's sessions" in older.text
        assert newer.process.poll() is None
