"""New weights under load: whoever is served, every reply is what its version computes."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest

from conftest import streams_of, wait_until
from serving_models import served
from slotstream import Client
from slotstream.names import Keys
from slotstream_worker.weights import InUse, Piece, publish, swap
from slotstream_worker.weights.catalogue import Catalogue
from slotstream_worker.weights.retention import delete
from weights_kit import Oracle, variant

SESSIONS = 12
KEYS = Keys("slotstream")


@pytest.fixture(scope="module")
def model():
    return served()


@pytest.fixture(scope="module")
def trees(model):
    return {f"v{k}": variant(model, k) for k in range(1, 6)}


@pytest.fixture(scope="module")
def oracle(model, trees):
    return Oracle(model, trees)


@pytest.fixture
def catalogue(client):
    return Catalogue(client.link, "slotstream")


class Load:
    """Sessions that push at a rate until they are told to stop."""

    def __init__(self, url, model, sessions=SESSIONS, rate_hz=25.0, most=400, seed=1, prefix="s"):
        streams = streams_of(sessions, most, model.frame_shape, seed=seed)
        self.streams = {f"{prefix}{k[1:]}": v for k, v in streams.items()}
        self.sent: dict[str, list] = {name: [] for name in self.streams}
        self.replies: dict[str, list] = {}
        self.seen: dict[str, list] = {name: [] for name in self.streams}
        self.times: list[float] = []
        self.enough = threading.Event()
        self.error: BaseException | None = None
        self._url, self._rate = url, rate_hz
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _frames(self, name):
        for frame in self.streams[name]:
            if self.enough.is_set():
                return
            self.sent[name].append(frame)
            yield frame

    def _run(self):
        def seen(session, reply):
            self.seen[session].append(reply.weights)

        try:
            with Client(self._url, window=8, patience_s=60) as client:
                self.replies = client.run(
                    {name: self._frames(name) for name in self.streams},
                    rate_hz=self._rate, timeout_s=60, on_reply=seen,
                )  # fmt: skip
        except BaseException as error:
            self.error = error

    def on(self, version, timeout_s=30):
        """Wait until every session has been answered by a version."""
        wait_until(
            lambda: self.error or all(v and v[-1] == version for v in self.seen.values()),
            timeout_s, f"every session runs with {version}",
        )  # fmt: skip
        assert not self.error, self.error

    def finish(self):
        self.enough.set()
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert not self.error, self.error
        for name, sent in self.sent.items():
            ids = [reply.id for reply in self.replies[name]]
            assert len(ids) == len(sent) == len(set(ids)), f"{name}: lost or twice"
            assert ids == sorted(ids)
            assert not any(reply.error for reply in self.replies[name])
        return self

    def versions(self, name):
        return [key for key, _ in itertools.groupby(r.weights for r in self.replies[name])]


def assert_right(load, oracle, **kwargs):
    for name, replies in load.replies.items():
        assert oracle.wrong(load.sent[name], replies, **kwargs) == [], name
    spikes = np.concatenate([r.output["spikes"] for r in load.replies[next(iter(load.sent))]])
    assert 0.02 < spikes.mean() < 0.98, "the neurons must be at work for this to mean anything"


def metric(worker, name, **labels):
    registry = worker.worker.metrics.registry
    return registry.get_sample_value(f"slotstream_weights_{name}", labels)


def test_sessions_change_one_by_one_and_each_reply_is_its_versions_own(
    redis_url, client, thread_worker, model, trees, oracle
):
    worker = thread_worker(model, slots=SESSIONS, checkpoint_interval_s=60.0)
    load = Load(redis_url, model)
    load.on(model.weights)
    for version, tree in trees.items():
        publish(client, tree, version=version)
        load.on(version)
    load.finish()
    assert_right(load, oracle)
    for name in load.sent:
        assert load.versions(name) == [model.weights, *trees], "each version once, in order"
    wait_until(lambda: len(worker.worker.engine.versions) == 3, 5, "only base and v5 are resident")
    assert set(worker.worker.engine.versions) == {"", model.weights, "v5"}
    assert metric(worker, "staging_bytes") == 0
    assert metric(worker, "applied_total") == 5
    wait_until(lambda: metric(worker, "session_changes_total") == 5 * SESSIONS, 5)
    assert metric(worker, "plans_total", outcome="miss") == 1
    assert metric(worker, "plans_total", outcome="refresh") == 4


@pytest.mark.parametrize("deep", [True, False])
def test_sessions_that_are_always_under_way_change_between_two_of_their_frames(
    redis_url, client, thread_worker, model, trees, oracle, monkeypatch, deep
):
    """A backlog: each session is in one of the rounds aloft, and rounds run both versions."""
    monkeypatch.setattr(swap, "_LEAST", 2)
    monkeypatch.setattr(swap, "_SHARE", 100)
    worker = thread_worker(model, slots=32, max_sessions=32)
    if not deep:  # several frames of a session a launch: those are of one version each
        worker.worker.engine.catch_up = []
    mixed = []
    of = worker.worker.host.residents.of
    worker.worker.host.residents.of = lambda sessions: (
        mixed.append(len({h.weights for h in sessions})) or of(sessions)
    )
    load = Load(redis_url, model, sessions=24, rate_hz=None, most=4000)
    load.on(model.weights)
    for version, tree in trees.items():
        publish(client, tree, version=version)
        load.on(version, 60)
    load.finish()
    assert_right(load, oracle)
    for name in load.sent:
        assert load.versions(name) == [model.weights, *trees]
    assert deep or mixed.count(2) > 5, "rounds must have run both versions"


def test_the_row_names_what_runs_everything_after_its_cursor(
    redis_url, client, thread_worker, model, trees
):
    thread_worker(model, checkpoint_interval_s=60.0)
    session = client.open("s")
    wait_until(lambda: client.redis.hget(KEYS.row("s"), "status") == b"live")
    assert client.redis.hget(KEYS.row("s"), "weights").decode() == model.weights
    frame = np.ones(model.frame_shape, np.float32)
    session.push(frame)
    (reply,) = session.replies(10)
    publish(client, trees["v1"], version="v1")
    wait_until(lambda: client.redis.hget(KEYS.row("s"), "weights") == b"v1", 10)
    cursor, done, count = client.redis.hmget(KEYS.row("s"), "cursor", "done", "count")
    assert (cursor, count) == (done, b"0")
    assert cursor.decode() == str(reply.id)
    session.push(frame)
    (reply,) = session.replies(10)
    assert reply.weights == "v1"


def test_a_replay_runs_each_entry_with_the_version_that_answered_it(
    redis_url, client, worker_process, model, trees, oracle
):
    """Killed after answers under v1 that no checkpoint covers; then v2 becomes current."""
    publish(client, trees["v1"], version="v1")
    options = ("--checkpoint-interval", "60", "--lease", "1", "--sweep", "0.5")
    first = worker_process(*options).wait_ready(1)
    frames = streams_of(3, 13, model.frame_shape, seed=9)
    sessions = {name: client.open(name) for name in frames}
    replies = {name: [] for name in frames}
    for name, session in sessions.items():
        for frame in frames[name][:6]:
            session.push(frame)
    for name, session in sessions.items():
        replies[name] += list(itertools.islice(session.replies(20), 6))
    rows = [client.redis.hmget(KEYS.row(n), "cursor", "count", "weights") for n in frames]
    assert rows == [[b"0-0", b"6", b"v1"]] * 3
    first.kill()
    publish(client, trees["v2"], version="v2")
    catalogue = Catalogue(client.link, "slotstream")
    # The dead worker's lease runs out in half a minute; the rows hold the version all the same.
    client.redis.delete("slotstream:weights:{slotstream}:v:v1:leases")
    with pytest.raises(InUse, match="named by 3 sessions"):
        delete(catalogue, "v1")
    second = worker_process(*options, log="second.log").wait_ready(1)
    for name, session in sessions.items():
        for frame in frames[name][6:12]:
            session.push(frame)
    for name, session in sessions.items():
        replies[name] += list(itertools.islice(session.replies(20), 6))
        wait_until(lambda n=name: client.redis.hget(KEYS.row(n), "weights") == b"v2", 10)
        session.push(frames[name][12])
        replies[name] += list(itertools.islice(session.replies(20), 1))
    for name in frames:
        assert [r.weights for r in replies[name][:6]] == ["v1"] * 6
        assert {r.weights for r in replies[name][6:]} <= {"v1", "v2"}
        assert replies[name][-1].weights == "v2"
        assert oracle.wrong(frames[name], replies[name]) == []
    assert second.terminate() == 0


def test_pinned_sessions_finish_on_the_version_they_began_with(
    redis_url, client, thread_worker, model, trees, oracle
):
    worker = thread_worker(model, slots=32)
    old = Load(redis_url, model, sessions=6, prefix="old")
    old.on(model.weights)
    publish(client, trees["v1"], version="v1", on_weights="pin")
    wait_until(lambda: worker.worker.host.residents.current == "v1", 10)
    new = Load(redis_url, model, sessions=6, prefix="new", seed=2)
    new.on("v1")
    time.sleep(0.5)
    old.on(model.weights)
    for load in (old.finish(), new.finish()):
        assert_right(load, oracle)
    assert all(old.versions(name) == [model.weights] for name in old.sent)
    assert all(new.versions(name) == ["v1"] for name in new.sent)


def test_no_more_versions_stay_for_the_pinned_than_there_may(
    redis_url, client, thread_worker, model, trees, oracle
):
    worker = thread_worker(model, slots=32)
    publish(client, trees["v1"], version="v1")
    wait_until(lambda: worker.worker.host.residents.current == "v1", 10)
    load = Load(redis_url, model, sessions=5)
    load.on("v1")
    publish(client, trees["v2"], version="v2", on_weights="pin")
    wait_until(lambda: worker.worker.host.residents.current == "v2", 10)
    second = Load(redis_url, model, sessions=5, seed=3, prefix="b")
    second.on("v2")
    load.on("v1")
    publish(client, trees["v3"], version="v3", on_weights="pin")
    load.on("v3")  # with v3 there would be three
    second.on("v2")
    for one in (load.finish(), second.finish()):
        assert_right(one, oracle)
    assert {tuple(load.versions(n)) for n in load.sent} == {("v1", "v3")}
    assert {tuple(second.versions(n)) for n in second.sent} == {("v2",)}


def test_reset_puts_each_session_at_rest_where_it_changes(
    redis_url, client, thread_worker, model, trees, oracle
):
    thread_worker(model, slots=SESSIONS)
    load = Load(redis_url, model)
    load.on(model.weights)
    publish(client, trees["v1"], version="v1", on_weights="reset")
    load.on("v1")
    publish(client, trees["v2"], version="v2")
    load.on("v2")
    load.finish()
    assert_right(load, oracle, reset=frozenset({"v1"}))
    name = next(iter(load.sent))
    assert oracle.wrong(load.sent[name], load.replies[name]), "rest must have been different"


def test_rolling_back_goes_to_the_old_version_and_to_what_the_worker_began_with(
    redis_url, client, thread_worker, model, trees, oracle, catalogue
):
    thread_worker(model, slots=SESSIONS)
    load = Load(redis_url, model)
    for version in ("v1", "v2"):
        publish(client, trees[version], version=version)
        load.on(version)
    catalogue.point(catalogue.before())
    load.on("v1")
    catalogue.point("")
    load.on(model.weights)
    load.finish()
    assert_right(load, oracle)
    assert {tuple(load.versions(n))[-4:] for n in load.sent} == {("v1", "v2", "v1", model.weights)}


def test_a_refused_version_is_never_served_and_the_old_one_goes_on(
    redis_url, client, thread_worker, model, trees, oracle, catalogue
):
    import jax

    from weights_kit import npz

    worker = thread_worker(model, slots=SESSIONS)
    load = Load(redis_url, model)
    publish(client, trees["v1"], version="v1")
    load.on("v1")
    poisoned = jax.tree.map(np.copy, trees["v2"])
    poisoned["params"]["Dense_0"]["kernel"][2, 3] = np.nan
    frames = load.streams["s0"][:4]
    publish(client, poisoned, version="bad", canary=npz(frames=frames))
    wait_until(lambda: catalogue.entry("bad").status == "refused", 20)
    assert "holds NaN" in catalogue.entry("bad").reason
    publish(client, {"params": {"w": np.zeros(3)}}, version="odd")
    wait_until(lambda: catalogue.entry("odd").status == "refused", 20)
    publish(client, trees["v3"], version="v3")
    load.on("v3")
    load.finish()
    assert_right(load, oracle)
    assert {tuple(load.versions(n))[-2:] for n in load.sent} == {("v1", "v3")}
    assert metric(worker, "refused_total") == 2


def test_a_standing_canary_guards_every_version(
    redis_url, client, thread_worker, model, trees, catalogue, tmp_path
):
    from serving_models import direct
    from weights_kit import npz

    frames = streams_of(1, 3, model.frame_shape, seed=4)["s0"]
    scores = direct(model, frames.reshape(-1, 6))["scores"].reshape(3, 4, 3)
    (tmp_path / "canary.npz").write_bytes(npz(frames=frames, scores=scores, bound=1e-6))
    worker = thread_worker(model, canary=tmp_path / "canary.npz")
    publish(client, trees["v1"], version="v1")
    wait_until(lambda: catalogue.entry("v1").status == "refused", 20)
    publish(client, model.variables, version="same")
    wait_until(lambda: worker.worker.host.residents.current == "same", 20)


def test_at_once_no_worker_applies_before_all_have_verified(
    redis_url, client, thread_worker, model, trees, oracle, catalogue
):
    workers = [thread_worker(model, slots=8, max_sessions=8, name=f"w{k}") for k in range(2)]
    load = Load(redis_url, model)
    load.on(model.weights)
    held = threading.Event()
    slow = workers[1].worker.receiver.fetcher
    fetch = slow.fetch
    slow.fetch = lambda update: held.wait(20) and fetch(update)
    publish(client, trees["v1"], version="v1", at_once=True)
    wait_until(lambda: "verified" in catalogue.said("v1").values(), 10, "one has verified")
    time.sleep(0.6)
    assert catalogue.state().current == ""
    assert {w.worker.host.residents.current for w in workers} == {model.weights}
    load.on(model.weights)
    held.set()
    load.on("v1")
    assert catalogue.state().current == "v1"
    load.finish()
    assert_right(load, oracle)


def test_at_once_one_refusal_is_everybodys(
    redis_url, client, thread_worker, model, trees, catalogue, tmp_path
):
    from weights_kit import npz

    frames = streams_of(1, 3, model.frame_shape, seed=4)["s0"]
    (tmp_path / "strict.npz").write_bytes(npz(frames=frames, bound=1e-9))
    workers = [thread_worker(model, slots=8, name="lenient"),
               thread_worker(model, slots=8, name="strict",
                             canary=tmp_path / "strict.npz")]  # fmt: skip
    publish(client, trees["v1"], version="v1", at_once=True)
    wait_until(lambda: catalogue.entry("v1").status == "refused", 20)
    time.sleep(0.5)
    assert {w.worker.host.residents.current for w in workers} == {model.weights}
    wait_until(lambda: "v1" not in workers[0].worker.engine.versions, 10, "it is released")


def test_a_worker_begins_on_the_version_that_is_current(
    redis_url, client, thread_worker, model, trees, oracle
):
    publish(client, trees["v1"], version="v1")
    publish(client, trees["v2"], version="v2")
    thread_worker(model, slots=SESSIONS)
    load = Load(redis_url, model, most=10)
    load.thread.join(30)
    load.finish()
    assert_right(load, oracle)
    assert {tuple(load.versions(n)) for n in load.sent} == {("v2",)}


def test_a_session_whose_version_is_gone_is_left_as_it_is_where_it_must_be_run_again(
    redis_url, client, worker_process, model, trees
):
    publish(client, trees["v1"], version="v1")
    options = ("--checkpoint-interval", "60", "--lease", "1", "--sweep", "0.5")
    first = worker_process(*options).wait_ready(1)
    session, fresh = client.open("s"), client.open("fresh")
    frame = np.ones(model.frame_shape, np.float32)
    session.push(frame)
    list(itertools.islice(session.replies(20), 1))
    wait_until(lambda: client.redis.hget(KEYS.row("fresh"), "weights") == b"v1")
    first.kill()
    publish(client, trees["v2"], version="v2")
    delete(Catalogue(client.link, "slotstream"), "v1", force=True)
    second = worker_process(*options, log="second.log").wait_ready(1)
    wait_until(lambda: "session s is left as it is" in second.text, 20)
    assert "not in the catalogue" in second.text
    before = client.redis.hmget(KEYS.row("s"), "done", "count", "weights")
    session.push(frame)
    fresh.push(frame)
    (reply,) = itertools.islice(fresh.replies(20), 1)
    assert reply.weights == "v2", "what is at a checkpoint goes on"
    time.sleep(0.5)
    assert client.redis.hmget(KEYS.row("s"), "done", "count", "weights") == before
    assert before[2] == b"v1"


def test_many_idle_sessions_change_too(redis_url, client, thread_worker, model, trees):
    worker = thread_worker(model, slots=16, max_sessions=200)
    sessions = client.open_many([f"i{k}" for k in range(150)])
    for session in sessions[:100]:
        session.push(np.full(model.frame_shape, 0.7, np.float32))
    wait_until(lambda: len(worker.worker.host) == 150, 20)
    publish(client, trees["v1"], version="v1")
    wait_until(
        lambda: {client.redis.hget(KEYS.row(s.id), "weights") for s in sessions} == {b"v1"}, 20
    )
    assert worker.worker.host.residents.sessions() == {"v1": 150}


@pytest.mark.timeout(400)
def test_on_a_cluster_chunks_lie_on_every_node_and_sessions_of_all_partitions_change(
    model, trees, oracle
):
    from cluster import Cluster
    from conftest import ThreadedWorker

    with Cluster() as cluster, Client(cluster.url, patience_s=20) as client:
        worker = ThreadedWorker(cluster.url, model, partition_count=16, slots=SESSIONS).start()
        try:
            load = Load(cluster.url, model)
            load.on(model.weights, 60)
            for version in ("v1", "v2"):
                fine = {"params": {
                    name: {leaf: [Piece(row[None], value.shape, (k, *[0] * (value.ndim - 1)))
                                  for k, row in enumerate(value)]
                           for leaf, value in layer.items()}
                    for name, layer in trees[version]["params"].items()
                }}  # fmt: skip
                publish(client, fine, version=version)
                load.on(version, 60)
            held = [len(server.call("KEYS", "*chunk*")) for server in cluster.primaries]
            assert min(held) > 5, held
            load.finish()
            assert_right(load, oracle)
            catalogue = Catalogue(client.link, "slotstream")
            wait_until(lambda: not catalogue.leases("v1"), 20)
            delete(catalogue, "v1")
            left = [key for s in cluster.primaries for key in s.call("KEYS", "*chunk:v1.*")]
            assert left == []
        finally:
            worker.drain()
