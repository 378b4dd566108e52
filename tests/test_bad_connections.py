"""Connections on their bad days: killed, cut in half, dropped, deaf; idle and stuck workers."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from conftest import ThreadedWorker, streams_of, wait_until
from mishaps import (
    Admin,
    Calm,
    Proxy,
    Traffic,
    assert_noted_briefly,
    assert_serves_on,
    assert_undisturbed,
    complaints,
    pass_time,
)
from serving_models import served
from slotstream import Client
from slotstream.lines import Line
from slotstream.names import Keys

KEYS = Keys("slotstream")
FAST = {"lease_s": 2.0, "sweep_s": 0.5, "checkpoint_interval_s": 0.3}


@pytest.fixture(scope="module")
def model():
    return served()


@pytest.fixture(scope="module")
def calm(model):
    calm = Calm(model)
    yield calm
    calm.close()


@pytest.fixture
def admin(redis_url):
    admin = Admin(redis_url)
    yield admin
    admin.close()


@pytest.fixture
def proxy(redis_server):
    proxy = Proxy(redis_server.port)
    yield proxy
    proxy.close()


def test_a_worker_whose_replies_are_cut_in_the_middle_loses_and_repeats_nothing(
    proxy, redis_url, model, calm, caplog
):
    worker = ThreadedWorker(proxy.url, model, **FAST).start()
    try:
        traffic = Traffic(redis_url, model, seed=21)
        traffic.reach(0.1)
        proxy.cut_every = 61  # a reconnection takes about twenty, and must be able to succeed
        traffic.reach(0.8)
        proxy.cut_every = 0
        assert proxy.cuts >= 5
        assert_undisturbed(traffic, calm)
        assert_noted_briefly(caplog, proxy.cuts)
        assert_serves_on(worker, redis_url, model)
    finally:
        proxy.cut_every = 0
        worker.drain()


def test_a_producer_whose_replies_are_cut_in_the_middle_pushes_and_reads_once(
    proxy, thread_worker, redis_url, model, calm, caplog
):
    worker = thread_worker(model, **FAST)
    traffic = Traffic(proxy.url, model, seed=22)
    traffic.reach(0.1)
    proxy.cut_every = 11
    traffic.reach(0.8)
    assert proxy.cuts >= 5
    proxy.cut_every = 0
    assert_undisturbed(traffic, calm)
    assert complaints(caplog) == []
    assert_serves_on(worker, redis_url, model)


def test_connections_killed_again_and_again_are_opened_again(
    redis_url, admin, thread_worker, model, calm, caplog
):
    worker = thread_worker(model, **FAST)
    traffic = Traffic(redis_url, model, seed=23)
    traffic.reach(0.1)
    kills = 0
    for k in range(12):
        for kind in (("normal",), ("pubsub",), ("normal", "pubsub"))[k % 3]:
            kills += admin("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes") > 0
        pass_time(0.15)
    assert traffic.going, "killed after the traffic had ended"
    assert kills >= 12
    assert_undisturbed(traffic, calm)
    assert_noted_briefly(caplog, kills)
    assert_serves_on(worker, redis_url, model)


def test_a_tracking_connection_dropped_for_its_full_buffer_is_opened_again(
    redis_url, admin, thread_worker, model, caplog
):
    worker = thread_worker(model, slots=8, max_sessions=256, **{**FAST, "sweep_s": 60.0})
    admin.config("client-output-buffer-limit", "pubsub 1 0 0")
    frames = streams_of(1, 200, model.frame_shape, seed=24)["s0"]
    with Client(redis_url, patience_s=20) as client:
        names = [f"{k:03d}".ljust(128, "x") for k in range(200)]
        sessions = client.open_many(names)
        wait_until(lambda: admin("SCARD", KEYS.owned(worker.worker.config.worker)) == 200, 20,
                   "all sessions are owned")  # fmt: skip
        before = worker.worker.metrics.reconnects._value.get()
        # At one blow, so that Redis has more news at once than the buffer holds.
        with client.redis.pipeline(transaction=True) as pipe:
            for session, frame in zip(sessions, frames, strict=True):
                pipe.xadd(session.inbox, {"frame": client.app.encode(frame)}, id="1000-0")
            pipe.execute()
        outs = [KEYS.outbox(name) for name in names]

        def answered() -> bool:
            with client.redis.pipeline(transaction=False) as pipe:
                for out in outs:
                    pipe.xrange(out, "1000-0", "+")
                return all(len(entries) == 1 for entries in pipe.execute())

        wait_until(answered, 20, "every frame is answered once")
        assert worker.worker.metrics.reconnects._value.get() > before, "nothing was dropped"
    assert_noted_briefly(caplog)
    assert_serves_on(worker, redis_url, model)


def test_a_tracking_table_that_overflows_loses_no_frame(
    redis_url, admin, thread_worker, model, calm, caplog
):
    admin.config("tracking-table-max-keys", 1)
    worker = thread_worker(model, **{**FAST, "sweep_s": 60.0})
    traffic = Traffic(redis_url, model, seed=25)
    assert_undisturbed(traffic, calm)
    assert complaints(caplog) == []
    assert_serves_on(worker, redis_url, model)


def cpu_s(thread: threading.Thread) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


@pytest.mark.parametrize("table", [1_000_000, 1], ids=["as_usual", "tracking_overflows"])
def test_an_idle_worker_with_fifty_open_sessions_uses_next_to_no_processor(
    redis_url, admin, thread_worker, model, table
):
    admin.config("tracking-table-max-keys", table)
    worker = thread_worker(model, slots=64)
    frame = streams_of(1, 1, model.frame_shape, seed=26)["s0"][0]
    with Client(redis_url) as client:
        sessions = client.open_many([f"idle{k}" for k in range(50)])
        for session in sessions:
            session.push(frame)
        for session in sessions:
            assert len(list(session.replies(20))) == 1
        pass_time(1.5)  # the checkpoints that are due
        before = cpu_s(worker.thread)
        pass_time(2)
        used = cpu_s(worker.thread) - before
        assert used < 0.2, f"{used:.2f} s of processor in 2 s of nothing"
        # It has not gone to sleep for good.
        session.push(frame)
        assert len(list(session.replies(5))) == 1


def test_a_worker_whose_loop_is_stuck_loses_its_sessions_to_another(
    redis_url, admin, thread_worker, model, calm, caplog, monkeypatch
):
    quick = {**FAST, "lease_s": 1.0, "stall_s": 0.5, "slots": 16}
    stuck = thread_worker(model, **quick)
    own = stuck.worker.config.worker
    traffic = Traffic(redis_url, model, seed=27, sessions=5, frames=50, rate_hz=10)
    traffic.reach(0.1)
    assert admin("SCARD", KEYS.owned(own)) == 5
    other = thread_worker(model, **quick)
    free, entered = threading.Event(), threading.Event()
    collect = stuck.worker.host.collect

    def blocked(flying):
        entered.set()
        assert free.wait(60)
        return collect(flying)

    monkeypatch.setattr(stuck.worker.host, "collect", blocked)
    try:
        assert entered.wait(10)
        wait_until(lambda: not admin("EXISTS", KEYS.lease(own)), 10, "the lease expires")
        wait_until(
            lambda: admin("SCARD", KEYS.owned(other.worker.config.worker)) == 5, 10, "a takeover"
        )
        came = traffic.replies
        wait_until(lambda: traffic.replies > came + 10, 20, "the other worker answers")
        assert traffic.going
        assert stuck.thread.is_alive()
    finally:
        # What it was about to publish is another's now: it must notice.
        monkeypatch.setattr(stuck.worker.host, "collect", collect)
        free.set()
    wait_until(lambda: admin("EXISTS", KEYS.lease(own)), 10, "the lease is back")
    assert_undisturbed(traffic, calm)
    assert any("no progress" in line for line in complaints(caplog))
    assert len(complaints(caplog)) <= 4, complaints(caplog)
    other.drain()
    assert_serves_on(stuck, redis_url, model)


def test_after_an_outage_nobody_takes_the_sessions_of_a_worker_that_lives(
    redis_server, redis_url, admin, model, calm, thread_worker
):
    quick = {**FAST, "lease_s": 1.0, "slots": 16}
    first, second = thread_worker(model, **quick), thread_worker(model, **quick)
    owners = [KEYS.owned(w.worker.config.worker) for w in (first, second)]
    frame = np.full(model.frame_shape, 0.7, np.float32)
    with Client(redis_url) as client:
        sessions = client.open_many([f"k{k}" for k in range(12)])
        for session in sessions:
            session.push(frame)
            assert len(list(session.replies(20))) == 1
        held = [admin("SMEMBERS", key) for key in owners]
        # Every lease is gone at once, and every connection.
        admin("DEL", *[KEYS.lease(w.worker.config.worker) for w in (first, second)])
        admin("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        admin("CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes")
        wait_until(lambda: all(admin("EXISTS", KEYS.lease(w.worker.config.worker))
                               for w in (first, second)), 10, "leases")  # fmt: skip
        pass_time(1.5)
        assert [admin("SMEMBERS", key) for key in owners] == held
        for session in sessions:
            session.push(frame)
            assert len(list(session.replies(20))) == 1
    assert first.error is None
    assert second.error is None


def test_a_connection_that_is_cut_while_its_tracking_is_set_up_is_an_outage_like_another(
    redis_url, admin, thread_worker, model, calm, monkeypatch
):
    worker = thread_worker(model, **FAST)
    traffic = Traffic(redis_url, model, seed=29)
    traffic.reach(0.2)
    call, cuts = Line.call, []

    def cutting(line, *command):
        if command[:2] == ("CLIENT", "TRACKING") and len(cuts) < 3:
            cuts.append(admin("CLIENT", "KILL", "ID", command[-1]))
        return call(line, *command)

    monkeypatch.setattr(Line, "call", cutting)
    admin("CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes")
    assert_undisturbed(traffic, calm)
    assert cuts == [1, 1, 1]
    assert_serves_on(worker, redis_url, model)
