"""`slotstream weights`: what an operator types, and reads."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from conftest import wait_until
from serving_models import served
from slotstream import Client
from slotstream.cli import cli, main
from slotstream_worker.weights.names import flatten
from weights_kit import npz, variant


@pytest.fixture(scope="module")
def model():
    return served()


@pytest.fixture
def files(model, tmp_path):
    """Two versions as files."""
    for k in (1, 2):
        flat = {n: np.asarray(v) for n, v in flatten(variant(model, k)).items()}
        save_file(flat, tmp_path / f"v{k}.safetensors")
    return tmp_path


@pytest.fixture
def run(redis_url):
    def run(*arguments, code=0):
        result = CliRunner().invoke(
            cli, ["weights", *map(str, arguments), "--redis", redis_url], catch_exceptions=True
        )
        said = result.output + (str(result.exception) if result.exception else "")
        assert (result.exit_code == 0) == (code == 0), said
        return said

    return run


def status(run):
    return json.loads(run("status", "--json"))


def test_a_version_is_published_watched_rolled_back_and_deleted(
    redis_url, client, thread_worker, model, files, run
):
    worker = thread_worker(model, weights_listen="127.0.0.1:0")
    session = client.open("s")
    said = run("publish", files / "v1.safetensors", "--version", "v1")
    nbytes = (files / "v1.safetensors").stat().st_size
    assert "version v1 is ready: 5 tensors in 5 shards" in said
    wait_until(lambda: worker.worker.host.residents.sessions() == {"v1": 1}, 20)
    wait_until(lambda: status(run)["workers"][worker.worker.config.worker]["resident"]["v1"], 10)
    held = status(run)
    (version,) = held["versions"]
    assert (held["current"], version["status"]) == ("v1", "ready")
    assert 0 < version["bytes"] < nbytes
    (report,) = held["workers"].values()
    assert "token" not in report
    assert report["current"] == "v1"
    assert report["resident"] == {model.weights: 0, "v1": 1}
    (update,) = report["updates"]
    assert update["state"] == "applied"
    assert update["moved"] == {"redis": version["bytes"]}
    assert {"plan", "transfer", "verify", "place"} <= update["seconds"].keys()
    assert report["plans"] == {"miss": 1}
    assert {c["source"] for c in report["capabilities"]} == {"redis", "file", "peer"}
    assert report["serves"].startswith("127.0.0.1:")

    run("publish", files / "v2.safetensors", "--version", "v2", "--on-weights", "reset")
    wait_until(lambda: worker.worker.host.residents.current == "v2", 20)
    text = run("status")
    assert "current: v2" in text
    assert "refresh" in text
    assert "from v2 to v1" in run("rollback")
    wait_until(lambda: worker.worker.host.residents.current == "v1", 20)
    assert "from v1 to what the workers were started with" in run("rollback", "--to-start")
    wait_until(lambda: worker.worker.host.residents.sessions() == {model.weights: 1}, 20)
    session.push(np.ones(model.frame_shape, np.float32))
    (reply,) = session.replies(10)
    assert reply.weights == model.weights
    wait_until(lambda: "v2" not in worker.worker.engine.versions, 10)
    wait_until(lambda: not status(run)["versions"][1]["leases"], 10)
    assert "version v2 is gone" in run("delete", "v2")
    assert [v["version"] for v in status(run)["versions"]] == ["v1"]


def test_mistakes_are_told_in_words(client, files, run):
    assert "--version" in run("publish", files / "v1.safetensors", code=1)
    assert "a version's name" in run("publish", files / "v1.safetensors", "--version", "a b",
                                     code=1)  # fmt: skip
    run("publish", files / "v1.safetensors", "--version", "v1")
    assert "already (ready)" in run("publish", files / "v2.safetensors", "--version", "v1", code=1)
    assert "the current one" in run("delete", "v1", code=1)
    assert "no version v7" in run("delete", "v7", code=1)
    assert "versions that are ready: v1" in run("rollback", "v7", code=1)
    assert "either a version or" in run("rollback", "v1", "--to-start", code=1)
    (files / "x.safetensors").write_bytes(b"nothing")
    assert "no safetensors file" in run("publish", files / "x.safetensors", "--version", "v3",
                                        code=1)  # fmt: skip


def test_the_entry_point_says_what_is_wrong_without_a_traceback(redis_url, files, capsys):
    with pytest.raises(SystemExit) as left:
        main(["weights", "delete", "v9", "--redis", redis_url])
    assert left.value.code == 1
    assert capsys.readouterr().err.strip() == "slotstream: there is no version v9"


def test_files_are_published_where_they_lie_and_with_a_canary(
    client, thread_worker, model, files, run
):
    worker = thread_worker(model)
    frames = np.random.default_rng(1).normal(size=(3, *model.frame_shape)).astype(np.float32)
    (files / "canary.npz").write_bytes(npz(frames=frames))
    run("publish", files / "v1.safetensors", "--version", "v1", "--in-place", "--canary",
        files / "canary.npz")  # fmt: skip
    wait_until(lambda: worker.worker.host.residents.current == "v1", 20)
    assert not client.redis.keys("*chunk*")
    (files / "strict.npz").write_bytes(npz(frames=frames, bound=1e-9))
    run("publish", files / "v2.safetensors", "--version", "v2", "--canary", files / "strict.npz")
    wait_until(lambda: status(run)["versions"][1]["status"] == "refused", 20)
    assert "beyond the bound" in " ".join(re.sub("[│┃]", " ", run("status")).split())
    assert status(run)["current"] == "v1"


def test_ranks_publish_from_several_commands(redis_url, run, files):
    said = run("publish", files / "v1.safetensors", "--version", "v1", "--ranks", "2",
               "--wait", "0")  # fmt: skip
    assert "rank 0 of 2 has published its part" in said
    with Client(redis_url) as client:
        assert client.redis.hget("slotstream:weights:{slotstream}:state", "current") is None
    said = run(
        "publish", files / "v1.safetensors", "--version", "v1", "--ranks", "2", "--rank", "1"
    )
    assert "version v1 is ready" in said
