"""TLS, users with least rights, and credentials that are wrong."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner
from redis.exceptions import NoPermissionError

from cluster import Cluster, Server, assert_same, server_version
from conftest import ThreadedWorker, WorkerProcess, streams_of, wait_until
from serving_models import served
from slotstream import Client, EntryId
from slotstream.cli import cli
from slotstream.embedded import EmbeddedRedis, find_server
from slotstream.names import Keys
from slotstream.operating import drain_worker, workers_of
from slotstream.slottable import read_table
from slotstream_worker.config import WorkerConfig
from slotstream_worker.service import serve
from slotstream_worker.worker import Worker

DOC = (Path(__file__).parent.parent / "docs" / "operations.md").read_text()
(_RULES,) = re.findall(r"```acl\n(.*?)```", DOC, re.DOTALL)
(_CANCEL,) = re.findall(r"```acl-cancel\n(.*?)\n```", DOC, re.DOTALL)
USERS = {line.split()[1]: line.split(maxsplit=2)[2] for line in _RULES.splitlines()}
KEYS = Keys("slotstream")


@pytest.fixture(scope="module")
def model() -> Any:
    return served()


@pytest.fixture(scope="module")
def calm(model: Any) -> Any:
    """Streams, and what a worker that nothing happens to answers."""
    streams = streams_of(6, 10, model.frame_shape, seed=11)
    with EmbeddedRedis() as server, Client(server.url) as client:
        worker = ThreadedWorker(server.url, model).start()
        replies = client.run(streams)
        worker.drain()
    return streams, replies


def starts_not(url: str, model: Any) -> BaseException:
    """What ends a worker at its start; it must not wait."""
    ended: list[BaseException] = []
    worker = Worker(WorkerConfig(redis=url, slots=4, row_counts=(4,)), model)
    stop = threading.Event()

    def run() -> None:
        try:
            serve(worker, stop)
        except BaseException as error:
            ended.append(error)
        finally:
            worker.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    waits = thread.is_alive()
    stop.set()
    thread.join(20)
    assert not waits, "it waits for what no waiting mends"
    assert ended, "it ended without a word"
    return ended[0]


# TLS


def _openssl(*command: str | Path) -> None:
    subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: Any) -> Path:
    """A certificate authority of one's own, and a server's certificate for 127.0.0.1."""
    folder: Path = tmp_path_factory.mktemp("certificates")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "stranger"):
        _openssl("req", "-x509", *curve, "-days", "2", "-subj", f"/CN=test {name}",
                 "-addext", "keyUsage=critical,keyCertSign,cRLSign",
                 "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem")  # fmt: skip
    _openssl("req", *curve, "-subj", "/CN=test server", "-keyout", folder / "server.key",
             "-out", folder / "server.csr")  # fmt: skip
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\n")
    _openssl("x509", "-req", "-in", folder / "server.csr", "-CA", folder / "ca.pem",
             "-CAkey", folder / "ca.key", "-CAcreateserial", "-days", "2",
             "-extfile", folder / "ext", "-out", folder / "server.pem")  # fmt: skip
    return folder


def tls_options(folder: Path) -> dict[str, Any]:
    return {
        "tls-cert-file": folder / "server.pem",
        "tls-key-file": folder / "server.key",
        "tls-ca-cert-file": folder / "ca.pem",
        "tls-auth-clients": "no",
    }


@pytest.fixture(scope="module")
def has_tls() -> None:
    """Skips where the server was built without TLS: it then stumbles over the first option."""
    command = [find_server(), "--port", "0", "--tls-port", "0", "--no-such-option", "1"]
    said = subprocess.run(command, check=False, capture_output=True, timeout=10, text=True)
    if "tls-port" in said.stdout + said.stderr:
        pytest.skip(f"{command[0]} was built without TLS")


@pytest.fixture
def tls_server(has_tls: None, certificates: Path) -> Iterator[Server]:
    server = Server(tls_options(certificates))
    server.options.update({"tls-port": server.port, "port": 0})
    server.start()
    yield server
    server.close()


def test_a_session_over_tls_is_the_same_and_a_stranger_s_certificate_is_refused(
    tls_server, certificates, calm, model
):
    streams, expected = calm
    url = f"rediss://127.0.0.1:{tls_server.port}/0?ssl_ca_certs={certificates / 'ca.pem'}"
    worker = ThreadedWorker(url, model).start()
    with Client(url) as client:
        assert_same(client.run(streams), expected)
    worker.drain()
    with (
        Client(url.replace("ca.pem", "stranger.pem"), patience_s=0.2) as client,
        pytest.raises(redis.ConnectionError, match="certificate verify failed"),
    ):
        client.config()
    # Not answered in the clear, either.
    with (
        Client(f"redis://127.0.0.1:{tls_server.port}/0", patience_s=0.2) as client,
        pytest.raises(redis.ConnectionError),
    ):
        client.config()


def test_a_cluster_with_tls_is_found_by_its_tls_ports(has_tls, certificates, calm, model):
    streams, expected = calm
    with Cluster(tls=tls_options(certificates)) as cluster:
        ports = {server.options["tls-port"] for server in cluster.servers}
        host = f"127.0.0.1:{cluster.primaries[0].options['tls-port']}"
        url = f"rediss+cluster://{host}?ssl_ca_certs={certificates / 'ca.pem'}"
        worker = ThreadedWorker(url, model, partition_count=16).start()
        with Client(url) as client:
            assert_same(client.run(streams), expected)
            asked = {address for address in client.link.endpoint._pools if address}
        assert {port for _, port in asked} <= ports
        assert len(asked) > 1
        worker.drain()


# Rights


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Server]:
    """A server with the users of docs/operations.md, and an administrator; nobody else."""
    if server_version() < (7,):
        pytest.skip("the rules in the documentation are those of Redis 7")
    lines = [f"user {name} {rules}" for name, rules in USERS.items()]
    lines += ["user admin on >admin-password ~* &* +@all", "user default off"]
    path = tmp_path / "users.acl"
    path.write_text("\n".join(lines) + "\n")
    server = Server({"aclfile": path}).start()
    yield server
    server.close()


def url_of(server: Server, user: str, password: str = "") -> str:
    return f"redis://{user}:{password or user + '-password'}@127.0.0.1:{server.port}/0"


def as_user(server: Server, user: str) -> redis.Redis:
    return redis.Redis.from_url(url_of(server, user), protocol=2)


def test_a_socket_does_as_well_as_an_address(calm, model):
    streams, expected = calm
    with EmbeddedRedis() as server:
        worker = ThreadedWorker(server.socket_url, model, checkpoint_interval_s=0.1).start()
        with Client(server.socket_url) as client:
            assert_same(client.run(streams), expected)
        worker.drain()


def test_a_producer_and_a_worker_need_no_more_than_the_rights_in_the_documentation(
    guarded, calm, model
):
    streams, expected = calm
    url = url_of(guarded, "worker")
    worker = ThreadedWorker(url, model, checkpoint_interval_s=0.1, sweep_s=0.2,
                            rebalance=True).start()  # fmt: skip
    with Client(url_of(guarded, "producer")) as client:
        assert_same(client.run(streams), expected)
        # Ids used before, a reader that is waited for, attaching, resetting, closing.
        first, *_ = streams
        session = client.open(first, replies="wait")
        for frame in streams[first]:
            session.push(frame)
        assert len(list(session.replies(20))) == len(streams[first])
        session.reset()
        again = client.attach(first)
        again.push(streams[first][0], end=True)
        assert next(iter(session.replies(20))).op == "reset"
        assert list(again.replies(20))[-1].end
        shut = client.open()
        shut.push(streams[first][0])
        shut.close()
        assert list(shut.replies(20))[-1].reason == "close"
    with Client(url) as operator:
        kept = operator.open("kept")
        kept.push(streams[first][0])
        assert len(list(kept.replies(20))) == 1
        assert [row["status"] for row in read_table(operator.app)] == ["live"]
        assert [seen.sessions for seen in workers_of(operator.app)] == [1]
        drain_worker(operator.app, worker.worker.config.worker, 20)
        wrong = kept.push(streams[first][1])
        assert kept.cancel(wrong)
        said = CliRunner().invoke(cli, ["retry", "nobody", "--redis", url])
        assert "is not set aside" in said.output
        # A worker that died: its sessions are taken, and one that is to blame is set aside.
        dead = ThreadedWorker(url, model, lease_s=1.0, sweep_s=0.2)
        operator.link.call("SADD", KEYS.workers, "dead.1")
        operator.link.call("SADD", KEYS.owned("dead.1"), "kept")
        operator.link.call("HSET", KEYS.row("kept"), "status", "live", "owner", "dead.1",
                           "attempts", "9")  # fmt: skip
        kept.push(streams[first][1])
        dead.start()
        last = list(kept.replies(20))[-1]
        assert last.reason == "quarantined"
        said = CliRunner().invoke(cli, ["retry", "kept", "--redis", url])
        assert said.exit_code == 0, said.output
        wait_until(lambda: [r["status"] for r in read_table(operator.app)] == ["live"], 20, "back")
    dead.drain()


def test_a_producer_is_refused_rows_scripts_and_other_apps(guarded):
    admin, producer = as_user(guarded, "admin"), as_user(guarded, "producer")
    row, inbox = KEYS.row("x"), KEYS.inbox("x")
    admin.hset(row, mapping={"status": "live", "done": "0-0", "state": "secret"})
    assert producer.xadd(inbox, {"frame": b"f"}, id="1-0") == b"1-0"
    assert producer.hget(row, "status") == b"live"
    refused: list[tuple[Any, ...]] = [
        ("HSET", row, "done", "9-9"),
        ("HINCRBY", row, "cuts", 1),
        ("DEL", row),
        ("XADD", row, "*", "a", "b"),
        ("XADD", KEYS.outbox("x"), "*", "output", "forged"),
        ("DEL", KEYS.control),
        ("XTRIM", inbox, "MAXLEN", 0),
        ("SADD", KEYS.sessions, "x"),
        ("SET", KEYS.lease("w"), "1"),
        ("SET", KEYS.order("w"), "drain"),
        ("HSET", "slotstream:config", "frame", 1),
        ("EVAL", "return 1", 0),
        ("XADD", "{other:0}:in:x", "*", "frame", "f"),
        ("XADD", "{other:0}:control", "*", "op", "close", "session", "x"),
        ("XREAD", "STREAMS", "{other:0}:out:x", "0"),
        ("HGETALL", "other:config"),
        ("GET", "anything"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("KEYS", "*"),
        ("ACL", "LIST"),
        ("CLIENT", "LIST"),
        ("MONITOR",),
        ("SUBSCRIBE", "__redis__:invalidate"),
    ]
    for command in refused:
        with pytest.raises(NoPermissionError):
            producer.execute_command(*command)
    with Client(url_of(guarded, "producer"), patience_s=5) as client:
        with pytest.raises(NoPermissionError):
            client.app.cancel("x", EntryId.parse("1-0"))
        # With the rule for it, the entry is cancelled, and rows are still not for writing.
        admin.execute_command("ACL", "SETUSER", "producer", _CANCEL)
        assert client.app.cancel("x", EntryId.parse("1-0"))
        for script in ("HSET", "HDEL"):
            with pytest.raises(redis.ResponseError):
                client.link.call("EVAL", f"return redis.call('{script}', KEYS[1], 'done', '9-9')",
                                 1, row)  # fmt: skip
    assert admin.hmget(row, "done", "cuts", "state") == [b"0-0", b"1", b"secret"]
    producer.close()
    admin.close()


def test_a_worker_is_refused_the_server_s_settings_and_other_apps(guarded):
    worker = as_user(guarded, "worker")
    assert worker.hset(KEYS.row("x"), "status", "live") == 1
    for command in (
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"),
        ("CONFIG", "GET", "*"),
        ("SHUTDOWN",),
        ("ACL", "SETUSER", "worker", "+@all"),
        ("CLIENT", "KILL", "TYPE", "normal"),
        ("REPLICAOF", "NO", "ONE"),
        ("KEYS", "*"),
        ("MONITOR",),
        ("SUBSCRIBE", "news"),
        ("PUBLISH", "__redis__:invalidate", "x"),
        ("HSET", "{other:0}:slot:x", "status", "live"),
        ("HSET", "other:config", "frame", "1"),
        ("DEL", "anything"),
        ("EVAL", "return redis.call('FLUSHALL')", 0),
        ("EVAL", "return redis.call('DEL', '{other:0}:slot:x')", 0),
    ):
        with pytest.raises(redis.ResponseError, match=r"ermission|can.t (run|access)"):
            worker.execute_command(*command)
    worker.close()


# Wrong credentials


def test_a_wrong_password_ends_a_worker_at_its_start_and_a_client_at_once(guarded, model):
    url = url_of(guarded, "worker", "guessed")
    error = starts_not(url, model)
    assert isinstance(error, redis.AuthenticationError)
    assert "username-password pair" in str(error)
    with Client(url, patience_s=60) as client, pytest.raises(redis.AuthenticationError):
        client.config()
    none = f"redis://127.0.0.1:{guarded.port}/0"
    error = starts_not(none, model)
    assert "uthentication required" in str(error)


def test_a_missing_right_ends_a_worker_at_its_start_and_names_it(guarded, model):
    admin = as_user(guarded, "admin")
    admin.execute_command("ACL", "SETUSER", "worker", "-client|tracking")
    error = starts_not(url_of(guarded, "worker"), model)
    assert isinstance(error, NoPermissionError)
    assert "client|tracking" in str(error)
    admin.close()


def test_a_wrong_password_is_not_waited_out_on_a_cluster_either(model):
    with Cluster(options={"requirepass": "right", "masterauth": "right"}) as cluster:
        host = f"127.0.0.1:{cluster.primaries[0].port}"
        for url in (f"redis+cluster://:wrong@{host}", f"redis+cluster://{host}"):
            error = starts_not(url, model)
            assert isinstance(error, redis.AuthenticationError)
        worker = ThreadedWorker(f"redis+cluster://:right@{host}", model, partition_count=16)
        worker.start().drain()


def test_the_command_says_what_is_wrong_and_fails(guarded, tmp_path):
    process = WorkerProcess(url_of(guarded, "worker", "guessed"), tmp_path / "log")
    try:
        assert process.process.wait(60) == 1
    finally:
        process.kill()
    assert "username-password pair" in process.text
    assert "Traceback" not in process.text
