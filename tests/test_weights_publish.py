"""Publications: every format, several ranks, and all that can go wrong on the way to a worker."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time

import flax.serialization
import ml_dtypes
import numpy as np
import pytest
import redis
from safetensors.numpy import save_file

from conftest import wait_until
from slotstream import Client
from slotstream.names import Keys
from slotstream_worker.weights import BadWeights, Incomplete, InUse, Piece, publish, publish_file
from slotstream_worker.weights.boxes import Box
from slotstream_worker.weights.catalogue import Catalogue
from slotstream_worker.weights.manifest import Manifest, Options, Shard, Tensor, assemble
from slotstream_worker.weights.names import flatten
from slotstream_worker.weights.retention import delete, prune
from weights_kit import Bench, assert_bits, holder, mixed, publish_ranks, share, zeros_like


def small(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return {"params": {"a": rng.normal(size=(40, 6)).astype(np.float32),
                       "b": rng.normal(size=9).astype(np.float32)}}  # fmt: skip


@pytest.fixture
def bench(redis_url):
    bench = Bench(redis_url, holder(zeros_like(small())))
    yield bench
    bench.close()


@pytest.fixture
def catalogue(client):
    return Catalogue(client.link, "slotstream")


def flat(tree: dict) -> dict:
    return {k: np.asarray(v) for k, v in flatten(tree).items()}


CUT_OFF = b"\x3f" + bytes(7) + b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}        '


# Formats


def safetensors(tree, folder):
    save_file(flat(tree), folder / "model.safetensors")
    return folder / "model.safetensors"


def dotted(tree, folder):
    names = {k.removeprefix("params/").replace("/", "."): v for k, v in flat(tree).items()}
    save_file(names, folder / "model.safetensors")
    return folder


def sharded(tree, folder):
    held, index = flat(tree), {}
    for k, (name, value) in enumerate(held.items()):
        index[name] = f"model-{k + 1:05}-of-{len(held):05}.safetensors"
        save_file({name: value}, folder / index[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def flax_msgpack(tree, folder):
    (folder / "model.msgpack").write_bytes(flax.serialization.msgpack_serialize(tree))
    return folder / "model.msgpack"


def orbax(tree, folder):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as writer:
        writer.save(folder / "step_3", tree)
    return folder / "step_3"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("write", [safetensors, dotted, sharded, flax_msgpack, orbax])
def test_every_format_gives_the_bits_that_were_saved(client, bench, tmp_path, write):
    tree = small(3)
    publish_file(client, write(tree, tmp_path), version="v1")
    assert bench.look() == ["v1"]
    assert_bits(bench.variables("v1"), tree)


@pytest.mark.parametrize("write", [safetensors, sharded])
def test_safetensors_are_read_where_they_lie(client, bench, tmp_path, write):
    tree = small(4)
    publish_file(client, write(tree, tmp_path), version="v1", in_place=True)
    assert bench.look() == ["v1"]
    assert_bits(bench.variables("v1"), tree)
    assert bench.receiver.updates["v1"].moved == {"file": 4 * (40 * 6 + 9)}
    assert not client.redis.keys("*chunk*")


def test_dtypes_that_numpy_has_no_name_for_come_from_safetensors(redis_url, client, tmp_path):
    import jax.numpy as jnp
    from safetensors.flax import save_file as save_flax

    values = np.arange(-6, 6).astype(ml_dtypes.bfloat16).reshape(3, 4)
    save_flax({"w": jnp.asarray(values)}, tmp_path / "m.safetensors")
    bench = Bench(redis_url, holder({"w": np.zeros((3, 4), ml_dtypes.bfloat16)}))
    publish_file(client, tmp_path / "m.safetensors", version="v1")
    assert bench.look() == ["v1"]
    assert_bits(bench.variables("v1"), {"w": values})
    bench.close()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("m.safetensors", b"", "its header is longer"),
        ("m.safetensors", b"\xff" * 40, "its header is longer"),
        ("m.safetensors", (4).to_bytes(8, "little") + b"nope", "no safetensors file that can be"),
        ("m.safetensors", CUT_OFF, "cut off"),
        ("m.index.json", b"{}", "no index of sharded"),
        ("m.index.json", b'{"weight_map":{"w":"gone.safetensors"}}', "which is not beside it"),
        ("m.msgpack", b"\xc1\xc1", "nor Flax msgpack"),
        ("m.bin", b"PK\x03\x04", "nor Flax msgpack"),
    ],
)  # fmt: skip
def test_a_broken_file_is_refused_with_what_is_wrong(client, tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadWeights, match=said):
        publish_file(client, tmp_path / name, version="v1")
    assert not client.redis.keys("*weights*")


# Ranks


def test_a_half_published_version_is_never_seen(redis_url, client, bench, catalogue):
    tree = small(1)
    with pytest.raises(Incomplete, match="of 2 ranks these have not published: 1"):
        publish(client, share(tree, "rows", 0, 2), version="v1", ranks=2, wait_s=0.2)
    assert catalogue.entry("v1").status == "publishing"
    assert catalogue.state().current == ""
    assert bench.look() == []
    # The other rank comes late, and the version is whole.
    publish(client, share(tree, "rows", 1, 2), version="v1", rank=1, ranks=2)
    assert bench.look() == ["v1"]
    assert_bits(bench.variables("v1"), tree)


def test_ranks_that_are_killed_and_come_again_make_one_version(client, bench, catalogue):
    tree, wrong = small(1), small(2)
    # A first attempt wrote other bytes and died before it said so.
    assert publish(client, share(wrong, "rows", 0, 2), version="v1", ranks=2, wait_s=0) is None
    assert publish(client, share(tree, "rows", 0, 2), version="v1", ranks=2, wait_s=0) is None
    publish(client, share(tree, "rows", 1, 2), version="v1", rank=1, ranks=2)
    assert bench.look() == ["v1"]
    assert_bits(bench.variables("v1"), tree)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"a": Piece(np.zeros((19, 6), np.float32), (40, 6), (21, 0))}, "of 240 elements"),
        ({"a": Piece(np.zeros((21, 6), np.float32), (40, 6), (19, 0))}, "overlap in"),
        ({"a": Piece(np.zeros((20, 6), np.float16), (40, 6), (20, 0))}, "all ranks give"),
        ({"a": Piece(np.zeros((20, 6), np.float32), (41, 6), (20, 0))}, "all ranks give"),
    ],
)
def test_ranks_that_do_not_fit_together_publish_nothing(client, bench, catalogue, other, said):
    mine = {"a": Piece(np.zeros((20, 6), np.float32), (40, 6), (0, 0)),
            "b": np.zeros(9, np.float32)}  # fmt: skip
    assert publish(client, {"params": mine}, version="v1", ranks=2, wait_s=0) is None
    with pytest.raises(BadWeights, match=said):
        publish(client, {"params": other}, version="v1", rank=1, ranks=2)
    assert catalogue.entry("v1").status == "refused"
    assert catalogue.state().current == ""
    assert bench.look() == []


def test_a_piece_that_is_no_part_of_its_tensor_is_refused_before_anything_is_written(client):
    with pytest.raises(BadWeights, match="no part of float32"):
        publish(client, {"a": Piece(np.zeros((3, 6), np.float32), (4, 6), (2, 0))}, version="v1")
    with pytest.raises(BadWeights, match="weights are arrays"):
        publish(client, {"a": object()}, version="v1")
    with pytest.raises(BadWeights, match="rank is 0 to 1"):
        publish(client, {"a": np.zeros(2)}, version="v1", rank=2, ranks=2)
    assert not client.redis.keys("*weights*")


def test_a_version_never_changes(client, catalogue):
    publish(client, small(1), version="v1")
    before = catalogue.manifest("v1")
    with pytest.raises(BadWeights, match=r"already \(ready\), and a version never changes"):
        publish(client, small(2), version="v1")
    assert catalogue.manifest("v1") == before


def test_ranks_say_the_same(client):
    publish(client, share(small(), "rows", 0, 2), version="v1", ranks=2, wait_s=0)
    with pytest.raises(BadWeights, match="All ranks say the same"):
        publish(client, share(small(), "rows", 1, 2), version="v1", rank=1, ranks=3, wait_s=0)
    with pytest.raises(BadWeights, match="All ranks say the same"):
        publish(client, share(small(), "rows", 1, 2), version="v1", rank=1, ranks=2,
                on_weights="pin", wait_s=0)  # fmt: skip


# What a worker refuses


def ready(catalogue: Catalogue, manifest: Manifest) -> None:
    """A version as a publisher with a mistake would make it: ready, whatever is in it."""
    catalogue.begin(manifest.version, 1, 0, manifest.options, "n", [])
    catalogue.ready(manifest)


def good(client, catalogue, version="good", seed=1) -> Manifest:
    publish(client, small(seed), version=version)
    found = catalogue.manifest(version)
    assert found
    return found


def with_shards(manifest: Manifest, version: str, change) -> Manifest:
    first, *rest = manifest.tensors
    return Manifest(version, (change(first), *rest), manifest.options)


def shape(t):
    whole = dataclasses.replace(t.shards[0], box=Box((0, 0), (6, 40)))
    return dataclasses.replace(t, shape=(6, 40), shards=(whole,))


MISTAKES = {
    "a missing shard": (lambda t: dataclasses.replace(t, shards=()), "there is none"),
    "overlapping shards": (lambda t: dataclasses.replace(t, shards=t.shards * 2), "overlap in"),
    "a wrong shape": (shape, "its shapes are not the model's"),
    "a wrong dtype": (lambda t: dataclasses.replace(t, dtype="int32"), "cannot be changed"),
    "a wrong name": (lambda t: dataclasses.replace(t, name="params/c"), "has no tensor for"),
}


@pytest.mark.parametrize("kind", list(MISTAKES))
def test_a_version_with_a_mistake_is_refused_before_a_byte_moves(client, bench, catalogue, kind):
    change, said = MISTAKES[kind]
    manifest = good(client, catalogue)
    assert bench.look() == ["good"]
    ready(catalogue, with_shards(manifest, "bad", change))
    assert catalogue.state().current == "bad"
    assert bench.look() == []
    entry = catalogue.entry("bad")
    assert entry.status == "refused"
    assert said in entry.reason, entry.reason
    # It is back to the last one that was not refused, and stays there.
    assert catalogue.state().current == "good"
    assert bench.receiver.updates["bad"].moved == {}
    assert bench.look() == []
    assert bench.receiver.goal == "good"


def test_a_version_of_another_state_is_refused_with_the_difference(redis_url, client):
    from serving_models import RecurrentMLP, linen_model

    bench = Bench(redis_url, linen_model(RecurrentMLP(), (6,), frame=4))
    import jax.numpy as jnp

    narrow = {"params": dict(bench.engine.model.variables["params"])}
    for name, leaf in flat(narrow).items():
        assert leaf.ndim, name
    wide = {"params": {
        "RecurrentLIF_0": {"w": jnp.zeros((16, 16))},
        "Dense_0": {"kernel": jnp.zeros((6, 16)), "bias": jnp.zeros(16)},
        "Dense_1": {"kernel": jnp.zeros((16, 3)), "bias": jnp.zeros(3)}}}  # fmt: skip
    publish(client, wide, version="wide")
    assert bench.look() == []
    reason = bench.receiver.failed["wide"]
    assert "params/Dense_0/kernel is [6, 16] and the model's [6, 12]" in reason
    bench.close()


def test_a_flipped_byte_is_seen_whichever_it_is_and_the_version_refused(client, bench, catalogue):
    good(client, catalogue)
    bench.look()
    manifest = good(client, catalogue, "bad", seed=2)
    key = b"slotstream:weights:chunk:" + (
        manifest.tensors[0].shards[0].sources[0].where["prefix"].encode() + b":0"
    )
    raw = bytearray(client.redis.get(key))
    raw[len(raw) // 2] ^= 0x10
    client.redis.set(key, bytes(raw))
    for _ in range(3):
        bench.receiver._again_at.clear()
        assert bench.look() == []
    assert catalogue.entry("bad").status == "refused"
    assert "not those of its digest" in catalogue.entry("bad").reason
    assert catalogue.state().current == "good"
    assert bench.receiver.updates["bad"].state == "refused"
    assert bench.receiver.fetcher.staging_bytes == 0
    assert bench.value("staging_bytes") == 0


def test_a_replica_with_the_right_bytes_is_found(client, bench, catalogue, redis_url):
    tree = small(6)
    publish_ranks(redis_url, tree, "v1", "replicated", 2)
    manifest = catalogue.manifest("v1")
    prefix = manifest.tensors[0].shards[0].sources[0].where["prefix"]
    client.redis.delete(f"slotstream:weights:chunk:{prefix}:0")
    assert bench.look() == ["v1"]
    assert_bits(bench.variables("v1"), tree)


def test_what_goes_while_it_is_read_is_tried_again_and_then_refused(client, bench, catalogue):
    good(client, catalogue)
    bench.look()
    manifest = good(client, catalogue, "bad", seed=2)
    prefix = manifest.tensors[1].shards[0].sources[0].where["prefix"]
    client.redis.delete(f"slotstream:weights:chunk:{prefix}:0")
    assert bench.look() == []
    assert bench.receiver.updates["bad"].state == "discovered"  # it may come yet
    for _ in range(2):
        bench.receiver._again_at.clear()
        bench.look()
    assert "chunk 0 of 1 is not in Redis" in catalogue.entry("bad").reason
    assert catalogue.state().current == "good"


def test_one_worker_that_cannot_read_does_not_refuse_for_all(
    redis_url, client, catalogue, tmp_path
):
    """Its path is not mounted, say: the version is good for the others."""
    one = Bench(redis_url, holder(zeros_like(small())), name="one")
    two = Bench(redis_url, holder(zeros_like(small())), name="two")
    for bench in (one, two):
        bench.look()
    publish(client, small(7), version="v1", folder=tmp_path)
    real = one.receiver.fetcher._transports
    one.receiver.fetcher._transports = lambda manifest: [real(manifest)[-1]]
    for _ in range(3):
        one.receiver._again_at.clear()
        assert one.look() == []
    assert one.receiver.updates["v1"].state == "refused"
    assert catalogue.entry("v1").status == "ready"
    assert two.look() == ["v1"]
    for bench in (one, two):
        bench.close()


def test_staging_memory_is_bounded(redis_url, client, catalogue):
    bench = Bench(redis_url, holder(zeros_like(small())), staging_bytes=500)
    publish(client, small(), version="v1")
    for _ in range(3):
        bench.receiver._again_at.clear()
        assert bench.look() == []
    assert "--staging-bytes is 500" in bench.receiver.failed["v1"]
    bench.close()


# Peers


def test_a_worker_that_holds_a_version_serves_it_to_others(redis_url, client, catalogue):
    tree = small(8)
    server = Bench(redis_url, holder(zeros_like(small())), name="one", weights_listen="127.0.0.1:0")
    server.receiver._run = lambda: None
    server.receiver.start()
    publish(client, tree, version="v1")
    assert server.look() == ["v1"]
    server.receiver._report(force=True)
    other = Bench(redis_url, holder(zeros_like(small())), name="two")
    for key in client.redis.keys("*chunk*"):
        client.redis.delete(key)
    assert other.look() == ["v1"]
    assert other.receiver.updates["v1"].moved == {"peer": 4 * (40 * 6 + 9)}
    assert_bits(other.variables("v1"), tree)
    assert server.receiver._server.served_bytes == 4 * (40 * 6 + 9)
    for bench in (server, other):
        bench.close()


def test_a_peer_that_serves_wrong_bytes_is_not_believed(redis_url, client, catalogue):
    tree = small(8)
    server = Bench(redis_url, holder(zeros_like(small())), name="one", weights_listen="127.0.0.1:0")
    server.receiver._run = lambda: None
    provide = server.receiver.holdings.provide

    def lie(version, tensor, box):
        data = bytearray(provide(version, tensor, box))
        data[7] ^= 1
        return memoryview(data)

    server.receiver.holdings.provide = lie
    server.receiver.start()
    publish(client, tree, version="v1")
    server.look()
    server.receiver._report(force=True)
    other = Bench(redis_url, holder(zeros_like(small())), name="two")
    assert other.look() == ["v1"]
    assert_bits(other.variables("v1"), tree)
    assert other.receiver.updates["v1"].moved["redis"] > 0
    for bench in (server, other):
        bench.close()


def test_a_stranger_is_cut_off(redis_url, client):
    from slotstream_worker.weights.errors import ShardGone
    from slotstream_worker.weights.transports.peers import Peer, Peers, PeerServer

    asked = []
    server = PeerServer("127.0.0.1", 0, "secret", lambda *args: asked.append(args))
    server.start()
    publish(client, small(), version="v1")
    tensor = Catalogue(client.link, "slotstream").manifest("v1").tensors[0]
    peers = Peers("v1", lambda: [Peer("w", "127.0.0.1", server.port, "guess")])
    with pytest.raises(ShardGone, match="closed"):
        peers.read(tensor, tensor.shards[0], memoryview(bytearray(960)), lambda: None)
    assert asked == []
    server.stop()


def test_workers_that_serve_read_from_redis_once(redis_url, client, catalogue):
    benches = [
        Bench(redis_url, holder(zeros_like(small())), name=f"w{k}", weights_listen="127.0.0.1:0")
        for k in range(4)
    ]
    for bench in benches:
        bench.receiver.start()
        assert bench.receiver.synced.wait(10)
    wait_until(lambda: len(catalogue.reports()) == 4, 10, "all have reported")
    tree = small(9)
    publish(client, tree, version="v1")
    for bench in benches:
        wait_until(lambda b=bench: b.receiver.holdings.has("v1"), 20, "all have it")
    sources = [list(bench.receiver.updates["v1"].moved) for bench in benches]
    assert sorted(sources) == [["peer"], ["peer"], ["peer"], ["redis"]]
    for bench in benches:
        assert_bits(bench.variables("v1"), tree)
        bench.receiver.stop()


# Retention


def test_a_version_is_kept_while_it_is_current_leased_or_named(redis_url, client, catalogue):
    for k in (1, 2, 3):
        publish(client, small(k), version=f"v{k}", keep=0)
    with pytest.raises(InUse, match="the current one"):
        delete(catalogue, "v3")
    assert catalogue.lease("v2", "reader", 30) == "ok"
    with pytest.raises(InUse, match="held by reader"):
        delete(catalogue, "v2")
    keys = Keys("slotstream")
    client.redis.sadd(keys.sessions, "s")
    client.redis.hset(keys.row("s"), mapping={"status": "live", "weights": "v1"})
    with pytest.raises(InUse, match=r"named by 1 sessions \(s\)"):
        delete(catalogue, "v1")
    assert prune(catalogue, 1) == []
    assert catalogue.lease("v1", "reader", 30) == "ok", "a deletion that was called off leaves it"
    catalogue.unlease("v1", "reader")
    catalogue.unlease("v2", "reader")
    client.redis.hset(keys.row("s"), "weights", "v3")
    assert prune(catalogue, 1) == ["v1", "v2"]
    assert catalogue.lease("v1", "reader", 30) == "gone"
    assert [e.version for e in catalogue.entries()] == ["v3"]
    prefixes = {k.decode().split(":")[3].split(".")[0] for k in client.redis.keys("*chunk*")}
    assert prefixes == {"v3"}


def test_a_trainers_loop_leaves_no_more_than_it_keeps(client, catalogue):
    for k in range(8):
        publish(client, small(k), version=f"v{k}", keep=3)
    assert [e.version for e in catalogue.entries()] == ["v5", "v6", "v7"]
    assert len(client.redis.keys("*chunk*")) == 3 * 2


def test_a_lease_that_ran_out_holds_nothing(client, catalogue):
    for k in (1, 2):
        publish(client, small(k), version=f"v{k}", keep=0)
    catalogue.lease("v1", "reader", 0.05)
    wait_until(lambda: prune(catalogue, 1) == ["v1"], 5, "the lease runs out")


def test_publications_that_came_to_nothing_are_cleared_away(client, catalogue):
    publish(client, share(small(), "rows", 0, 2), version="half", ranks=2, wait_s=0)
    publish(client, small(), version="v1")
    assert prune(catalogue, 1) == []
    assert prune(catalogue, 1, stale_s=0.0) == ["half"]
    assert {k.decode().split(":")[3].split(".")[0] for k in client.redis.keys("*chunk*")} == {"v1"}


def test_rolling_back_is_to_the_version_before_or_to_a_named_one(client, catalogue):
    for k in (1, 2, 3):
        publish(client, small(k), version=f"v{k}")
    assert catalogue.before() == "v2"
    catalogue.point("v2")
    assert (catalogue.state().current, catalogue.before()) == ("v2", "v3")
    catalogue.point("v1", "reset")
    assert (catalogue.state().current, catalogue.state().on_weights) == ("v1", "reset")
    with pytest.raises(BadWeights, match="does not exist; versions that are ready: v1, v2, v3"):
        catalogue.point("v9")
    catalogue.point("")
    assert catalogue.state().current == ""


def test_publishing_outlasts_a_restart_of_redis(redis_server_on_disk):
    url, server = redis_server_on_disk
    with Client(url, patience_s=30) as client:
        tree = {"w": np.random.default_rng(0).normal(size=(700, 1024)).astype(np.float32)}
        done = []
        thread = threading.Thread(target=lambda: done.append(publish(client, tree, version="v1")))
        thread.start()
        server.restart()
        thread.join(40)
        assert [manifest.nbytes for manifest in done] == [700 * 1024 * 4]
        bench = Bench(url, holder(zeros_like(tree)))
        assert bench.look() == ["v1"]
        assert_bits(bench.variables("v1"), tree)
        bench.close()


@pytest.fixture
def redis_server_on_disk():
    from slotstream.embedded import EmbeddedRedis

    with EmbeddedRedis(append_only=True) as server:
        yield server.url, server


def test_staging_outlasts_an_outage_that_is_longer_than_anybodys_patience(redis_server_on_disk):
    url, server = redis_server_on_disk
    tree = {"w": np.random.default_rng(0).normal(size=(4000, 1024)).astype(np.float32),
            "v": np.arange(7, dtype=np.float32)}  # fmt: skip
    bench = Bench(url, holder(zeros_like(tree)))
    with Client(url, patience_s=10) as client:
        publish(client, tree, version="v1")
    fetcher, beats = bench.receiver.fetcher, []
    beat = fetcher._beat

    def beat_and_kill():
        beats.append(1)
        if len(beats) == 2:
            server.kill()
            threading.Timer(5.0, server.start).start()
        fetcher._ticked_at = 0.0
        beat()

    fetcher._beat = beat_and_kill
    deadline = time.monotonic() + 30
    came: list[str] = []
    while not came and time.monotonic() < deadline:
        with contextlib.suppress(redis.RedisError):
            came = bench.look()
    assert came == ["v1"]
    assert_bits(bench.variables("v1"), tree)
    assert bench.receiver.updates["v1"].state == "verified"
    assert fetcher.staging_bytes == 0
    bench.close()


def test_a_device_that_is_full_refuses_here_and_the_next_version_comes(client, bench, catalogue):
    fetcher = bench.receiver.fetcher
    layout = fetcher.layout

    class Full(type(layout)):
        def place(self, _buffers):
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory on the device")

    publish(client, small(1), version="v1")
    fetcher.layout = Full(layout.leaves, layout.like)
    for _ in range(3):
        bench.receiver._again_at.clear()
        assert bench.look() == []
    assert "RESOURCE_EXHAUSTED" in bench.receiver.failed["v1"]
    assert bench.receiver.updates["v1"].state == "refused"
    assert fetcher.staging_bytes == 0
    fetcher.layout = layout
    publish(client, small(2), version="v2")
    assert bench.look() == ["v2"]


# The canary


def test_the_canary_refuses_nan_and_what_leaves_the_bound(redis_url, client, catalogue):
    import jax

    from serving_models import direct, served
    from weights_kit import npz

    model = served()
    bench = Bench(redis_url, model)
    bench.engine.prepare((4,))
    rng = np.random.default_rng(2)
    frames = rng.normal(size=(5, *model.frame_shape)).astype(np.float32)
    known = direct(model, frames.reshape(-1, 6))
    expected = {"scores": known["scores"].reshape(5, 4, 3)}
    near = jax.tree.map(np.asarray, model.variables)
    poisoned = jax.tree.map(np.copy, near)
    poisoned["params"]["Dense_1"]["bias"][1] = np.nan
    loud = jax.tree.map(np.copy, near)
    loud["params"]["Dense_1"]["bias"] += 5.0
    publish(client, near, version="near", canary=npz(frames=frames, bound=1e-5, **expected))
    assert bench.look() == ["near"]
    for version, tree, arrays, said in (
        ("nan", poisoned, {}, "NaN"),
        ("nan2", poisoned, {**expected, "bound": 1e9}, "NaN"),
        ("loud", loud, {**expected, "bound": 1.0}, "and the bound is 1"),
        ("far", loud, {"bound": 2.0}, "beyond the bound 2"),
    ):
        publish(client, tree, version=version, canary=npz(frames=frames, **arrays), keep=0)
        assert bench.look() == []
        assert said in catalogue.entry(version).reason, catalogue.entry(version).reason
        assert catalogue.state().current == "near"
    publish(client, loud, version="meant", canary=npz(frames=frames, bound=50.0))
    assert bench.look() == ["meant"]
    bench.close()


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({}, "has `frames`"),
        ({"frames": np.zeros((2, 3), np.float32)}, "frames are"),
        ({"frames": np.zeros((2, 3, 2), np.complex64)}, "float32"),
        ({"frames": np.zeros((2, 3, 2), np.float32), "nonsense": np.zeros(2)}, "expects nonsense"),
    ],
)
def test_a_canary_that_does_not_fit_the_model_refuses_its_version(
    client, bench, catalogue, arrays, said
):
    from weights_kit import npz

    publish(client, small(), version="v1", canary=npz(**arrays))
    assert bench.look() == []
    assert said in catalogue.entry("v1").reason


def test_mixed_dtypes_survive_every_transport(redis_url, client, tmp_path):
    tree = mixed(11)
    for version, folder in (("chunks", None), ("files", tmp_path)):
        bench = Bench(redis_url, holder(zeros_like(tree)), name=version)
        publish(client, tree, version=version, folder=folder)
        assert bench.look() == [version]
        assert_bits(bench.variables(version), tree)
        bench.close()


def test_assembling_is_the_same_whoever_does_it():
    def part(rank):
        shard = Shard(Box((rank, 0), (1, 2)), f"d{rank}", ())
        return [Tensor("w", "float32", (2, 2), (shard,))]

    one = assemble("v", [part(0), part(1)], Options())
    two = assemble("v", [part(1), part(0)], Options())
    assert one.encode() == two.encode()
