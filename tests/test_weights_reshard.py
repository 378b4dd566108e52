"""However a model is cut into shards, the engine holds the same bits; and what plans cost."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from conftest import TESTS
from slotstream import Client
from slotstream_worker.weights import publish
from weights_kit import SHARDINGS, Bench, assert_bits, holder, mixed, publish_ranks, zeros_like


@pytest.fixture
def bench(redis_url):
    bench = Bench(redis_url, holder(zeros_like(mixed())))
    yield bench
    bench.close()


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("how", list(SHARDINGS))
def test_any_sharding_by_any_ranks_gives_the_same_bits(redis_url, bench, how, ranks):
    tree = mixed(seed=ranks)
    publish_ranks(redis_url, tree, "v1", how, ranks)
    assert bench.look() == ["v1"]
    assert_bits(bench.variables("v1"), tree)
    assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(bench.variables("v1")))
    assert bench.receiver.fetcher.staging_bytes == 0


def test_files_on_a_shared_path_give_the_same_bits(redis_url, bench, tmp_path):
    tree = mixed(seed=5)
    publish_ranks(redis_url, tree, "v1", "grid", 4, folder=tmp_path)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 4
    assert not list(tmp_path.rglob("*.part"))
    assert bench.look() == ["v1"]
    assert_bits(bench.variables("v1"), tree)
    assert bench.receiver.updates["v1"].moved.keys() == {"file"}


def test_a_plan_is_made_once_a_layout_and_refreshed_for_other_values(redis_url, bench):
    with Client(redis_url) as client:
        publish(client, mixed(1), version="v1")
        bench.look()
        publish(client, mixed(2), version="v2")
        bench.look()
        publish(client, mixed(2), version="v3")
        bench.look()
        publish_ranks(redis_url, mixed(3), "v4", "rows", 2)
        bench.look()
    said = [bench.receiver.updates[f"v{k}"].plan for k in (1, 2, 3, 4)]
    assert said == ["miss", "refresh", "hit", "miss"]
    assert bench.value("plans_total", outcome="miss") == 2
    assert_bits(bench.variables("v4"), mixed(3))


def test_the_device_layout_is_filled_shard_by_shard():
    """Eight devices, a leaf cut over both axes, one over one axis, one on all; in a process."""
    script = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from slotstream_worker.weights.layout import Layout
from slotstream_worker.weights.manifest import assemble, Options, Shard, Source, Tensor
from slotstream_worker.weights.boxes import Box
from slotstream_worker.weights.digests import digest
from slotstream_worker.weights.plan import build
from slotstream_worker.weights.staging import Staging
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
rng = np.random.default_rng(0)
values = {"both": rng.normal(size=(8, 6)).astype("f4"), "one": rng.normal(size=(12,)).astype("f4"),
          "all": rng.normal(size=(5, 3)).astype("f4")}
specs = {"both": P("a", "b"), "one": P("b"), "all": P()}
placed = {k: NamedSharding(mesh, spec) for k, spec in specs.items()}
like = {k: jax.device_put(np.zeros_like(v), placed[k]) for k, v in values.items()}
layout = Layout.of(like)
assert {leaf.name: len(leaf.boxes) for leaf in layout.leaves} == {"all": 1, "both": 8, "one": 2}
data, tensors = {}, []
for name, value in values.items():
    shards = []
    for start, stop in ((0, 3), (3, len(value))):
        part = np.ascontiguousarray(value[start:stop])
        box = Box((start, *[0] * (value.ndim - 1)), part.shape)
        data[name, box] = part.tobytes()
        shards.append(Shard(box, digest(part.tobytes()), (Source("memory", {}),)))
    tensors.append(Tensor(name, "float32", value.shape, tuple(shards)))
class Memory:
    kind, artifact = "memory", "bytes"
    def has(self, tensor, shard): return True
    def read(self, tensor, shard, into, tick): into[:] = data[tensor.name, shard.box]
    def close(self): pass
manifest = assemble("v", [tensors], Options())
staging = Staging(manifest, build(manifest, layout), layout)
staging.run([Memory()], lambda: None)
found = staging.place()
for name, value in values.items():
    assert found[name].sharding == like[name].sharding, name
    assert np.asarray(found[name]).tobytes() == value.tobytes(), name
print("right")
"""
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=TESTS, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout.strip()) == (0, "right"), ran.stderr


def test_a_trainers_sharded_arrays_are_published_each_replica_once(redis_url):
    script = f"""
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from slotstream import Client
from slotstream_worker.weights import publish
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
value = np.arange(48, dtype="f4").reshape(8, 6)
with Client({redis_url!r}) as client:
    manifest = publish(client, {{"w": jax.device_put(value, NamedSharding(mesh, P("a", None)))}},
                       version="v1")
boxes = [str(s.box) for s in manifest.tensors[0].shards]
print(boxes)
"""
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert ran.stdout.strip() == "['[0:2, 0:6]', '[2:4, 0:6]', '[4:6, 0:6]', '[6:8, 0:6]']", (
        ran.stderr
    )
    bench = Bench(redis_url, holder({"w": np.zeros((8, 6), np.float32)}))
    assert bench.look() == ["v1"]
    assert_bits(bench.variables("v1"), {"w": np.arange(48, dtype=np.float32).reshape(8, 6)})
    bench.close()


def test_dtypes_change_without_a_loss_and_with_one_only_where_it_is_meant(redis_url):
    held = {"a": np.zeros((4, 3), np.float32), "b": np.zeros(6, np.float16)}
    bench = Bench(redis_url, holder(held))
    rng = np.random.default_rng(4)
    narrow = {"a": rng.normal(size=(4, 3)).astype(ml_dtypes.bfloat16),
              "b": rng.normal(size=6).astype(np.float16)}  # fmt: skip
    wide = {"a": rng.normal(size=(4, 3)), "b": np.full(6, 1e9, np.float32)}
    with Client(redis_url) as client:
        publish(client, narrow, version="narrow")
        assert bench.look() == ["narrow"]
        publish(client, wide, version="wide")
        assert bench.look() == []
        assert "a is float64 and the model's float32" in bench.receiver.failed["wide"]
        assert "--cast" in bench.receiver.failed["wide"]
        publish(client, wide, version="meant", cast=True)
        assert bench.look() == ["meant"]
        publish(client, {"a": np.zeros((4, 3), np.int32), "b": wide["b"]}, version="kind",
                cast=True)  # fmt: skip
        assert bench.look() == []
    assert_bits(bench.variables("narrow"), {"a": narrow["a"].astype(np.float32), "b": narrow["b"]})
    assert_bits(bench.variables("meant"), {"a": wide["a"].astype(np.float32),
                                           "b": np.full(6, np.inf, np.float16)})  # fmt: skip
    bench.close()


def test_no_launch_is_compiled_anew_for_another_version(redis_url):
    import dataclasses

    from serving_models import served

    model = served()
    bench = Bench(redis_url, model)
    bench.engine.prepare((4,))
    engine = bench.engine
    engine.pool.admit(["s"])
    rng = np.random.default_rng(1)
    engine.run(["s"], rng.normal(size=(1, *model.frame_shape)).astype(np.float32))
    sizes = [engine.launcher._begin._cache_size(), engine.launcher._advance._cache_size()]
    changed = jax.tree.map(lambda w: np.asarray(w) * np.float32(1.5), model.variables)
    with Client(redis_url) as client:
        publish(client, changed, version="v1")
    assert bench.look() == ["v1"]
    engine.versions["v1"] = bench.variables("v1")
    state = engine.pool.read(["s"])
    frames = rng.normal(size=(1, *model.frame_shape)).astype(np.float32)
    (ran,) = engine.run(["s"], frames, weights="v1")
    assert sizes == [engine.launcher._begin._cache_size(), engine.launcher._advance._cache_size()]
    other = dataclasses.replace(model, variables=jax.tree.map(jnp.asarray, changed))
    from slotstream_worker.engine.engine import Engine

    calm = Engine(other, 4)
    calm.prepare((4,))
    calm.pool.admit(["s"])
    calm.pool.write({"s": state[0]})
    (alone,) = calm.run(["s"], frames)
    for name in ran.outputs:
        np.testing.assert_array_equal(ran.outputs[name], alone.outputs[name])
    bench.close()
