"""Redis Clusters and Sentinels for tests: real servers on 127.0.0.1, each ended by its pid."""

from __future__ import annotations

import itertools
import random
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import redis

from slotstream import Client, Reply
from slotstream.embedded import find_server
from slotstream.names import partition_of

SLOTS = 16384
NODE_TIMEOUT_MS = 1000
DOWN_AFTER_MS = 600
SERVICE = "streams"


def server_version() -> tuple[int, ...]:
    """Version of the redis-server that is found here; a bare machine has only the embedded 6.2."""
    text = subprocess.run([find_server(), "--version"], capture_output=True, text=True, check=True)
    return tuple(int(n) for n in text.stdout.split("v=")[1].split()[0].split("."))


def until(predicate: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Poll until `predicate` gives something true; a server that is not up yet counts as no."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if value := predicate():
                return value
        except (redis.RedisError, OSError):
            pass
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.02)


def free_port() -> int:
    """A port that is free, and the one 10,000 above it too (a cluster's nodes talk there).

    Both lie below the ports that the system hands out by itself.
    """
    while True:
        port = random.randint(12_000, 22_000)
        try:
            for one in (port, port + 10_000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", one))
            return port
        except OSError:
            continue


class Server:
    """One redis-server on 127.0.0.1, with a folder of its own; nothing but its pid ends it.

    Args:
        options: its command line, without the dashes.
        config: text of a configuration file, which a Sentinel must have.
        port: where it listens; a free one by default.
    """

    def __init__(
        self, options: dict[str, Any] | None = None, *, config: str = "", port: int = 0
    ) -> None:
        self.port = port or free_port()
        self.options = {"port": self.port, **(options or {})}
        self.folder = Path(tempfile.mkdtemp(prefix="slotstream-server-"))
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._client: redis.Redis | None = None

    def __repr__(self) -> str:
        return f"<redis-server {self.port}>"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        path = self.folder / "redis.log"
        return path.read_text() if path.exists() else ""

    def start(self, **more: Any) -> Server:
        options = {
            "bind": "127.0.0.1",
            "dir": self.folder,
            "save": "",
            "appendonly": "no",
            "repl-diskless-sync-delay": 0,
            "logfile": self.folder / "redis.log",
            **self.options,
            **{name.replace("_", "-"): value for name, value in more.items()},
        }
        command = [find_server()]
        if self._config:
            path = self.folder / "sentinel.conf"
            if not path.exists():
                path.write_text(f"port {self.port}\nbind 127.0.0.1\ndir {self.folder}\n"
                                f"logfile {self.folder / 'redis.log'}\n{self._config}")  # fmt: skip
            command += [str(path), "--sentinel"]
        else:
            for name, value in options.items():
                command += [f"--{name}", *str(value).split(" ")]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(self._answers, 15, f"redis-server {self.port} answers")
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"it ended at once:\n{self.log[-500:]}"
        port = self.options.get("tls-port", self.port)
        with socket.create_connection(("127.0.0.1", int(port)), timeout=1):
            return True

    def call(self, *command: Any) -> Any:
        """A command's answer as Redis gives it, as text."""
        if self._client is None:
            self._client = redis.Redis(
                port=self.port,
                password=self.options.get("requirepass"),
                protocol=2,
                decode_responses=True,
                socket_timeout=10,
            )
            self._client.response_callbacks.clear()
        return self._client.execute_command(*command)

    def info(self, section: str) -> dict[str, str]:
        """Fields of `INFO`."""
        return _fields(self.call("INFO", section))

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    def close(self) -> None:
        """End the server and delete its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _fields(text: str) -> dict[str, str]:
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def settle(primary: Server, replica: Server) -> None:
    """Let nobody write to `primary` any more, until its replica has all that was acknowledged.

    A primary acknowledges before its replica has a write; what was acknowledged is in the replica
    after this, so killing the primary loses nothing of it. Writes that come now are held back,
    and go down with the primary, unanswered.
    """
    primary.call("CLIENT", "PAUSE", 20_000, "WRITE")
    written = int(primary.info("replication")["master_repl_offset"])
    until(lambda: int(replica.info("replication")["slave_repl_offset"]) >= written, 10,
          "the replica has everything")  # fmt: skip


class _Group:
    """Servers that are started and ended together."""

    servers: list[Server]

    def start(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for server in self.servers:
            server.close()


class Cluster(_Group):
    """A Redis Cluster: three primaries, and a replica for each where that is asked for.

    Args:
        replicas: whether each primary has a replica.
        options: more of the servers' options.
        tls: options of TLS, on ports of its own, which the nodes use among themselves too.
    """

    def __init__(
        self,
        *,
        replicas: bool = False,
        options: dict[str, Any] | None = None,
        tls: dict[str, Any] | None = None,
    ) -> None:
        settings = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": NODE_TIMEOUT_MS,
            "cluster-replica-validity-factor": 0,
            "cluster-require-full-coverage": "no",
            "repl-ping-replica-period": 1,
            **(options or {}),
        }
        self.primaries = [Server(settings) for _ in range(3)]
        self.replicas = [Server(settings) for _ in range(3)] if replicas else []
        self.servers = [*self.primaries, *self.replicas]
        self.ids: dict[Server, str] = {}
        for server in self.servers if tls else ():
            server.options.update({"tls-port": free_port(), "tls-cluster": "yes", **(tls or {})})

    @property
    def url(self) -> str:
        """A URL that names one node."""
        return f"redis+cluster://127.0.0.1:{self.primaries[0].port}"

    def start(self) -> None:
        for k, server in enumerate(self.servers):
            server.start()
            server.call("CLUSTER", "SET-CONFIG-EPOCH", k + 1)
            self.ids[server] = server.call("CLUSTER", "MYID")
        for k, primary in enumerate(self.primaries):
            first, after = SLOTS * k // 3, SLOTS * (k + 1) // 3
            primary.call("CLUSTER", "ADDSLOTS", *range(first, after))
        for server in self.servers[1:]:
            port = server.options.get("tls-port", server.port)
            self.servers[0].call("CLUSTER", "MEET", "127.0.0.1", port)
        for server in self.servers:
            until(lambda s=server: self._knows_all(s), 20, f"{server} knows everyone")
        for primary, replica in zip(self.primaries, self.replicas, strict=False):
            replica.call("CLUSTER", "REPLICATE", self.ids[primary])
        for replica in self.replicas:
            until(lambda r=replica: r.info("replication").get("master_link_status") == "up", 20,
                  f"{replica} follows")  # fmt: skip
        self.wait_ok()
        for server in self.servers:  # all of them know who follows whom
            until(lambda s=server: s.call("CLUSTER", "NODES").count("slave ")
                  == len(self.replicas), 20, f"{server} knows the replicas")  # fmt: skip

    def _knows_all(self, server: Server) -> bool:
        info = _fields(server.call("CLUSTER", "INFO"))
        nodes = server.call("CLUSTER", "NODES").splitlines()
        return info["cluster_known_nodes"] == str(len(self.servers)) and not any(
            "handshake" in node for node in nodes
        )

    def wait_ok(self) -> None:
        """Wait until every node that runs says that all slots are served."""
        for server in self.servers:
            if server.runs:
                until(lambda s=server: "cluster_state:ok" in s.call("CLUSTER", "INFO"), 20,
                      f"{server} says ok")  # fmt: skip

    def owner(self, slot: int) -> Server:
        """The primary that serves a slot, by its own word."""
        for server in self.servers:
            nodes = server.call("CLUSTER", "NODES").splitlines() if server.runs else ()
            for line in nodes:
                parts = line.split(" ")
                if "myself" in parts[2] and any(_holds(part, slot) for part in parts[8:]):
                    return server
        raise AssertionError(f"nobody serves slot {slot}")

    def move_slot(self, slot: int, source: Server, target: Server) -> int:
        """Migrate a slot, as `redis-cli --cluster reshard` does; returns how many keys moved."""
        self.begin_move(slot, source, target)
        moved = 0
        while count := self.move_keys(slot, source, target, 10):
            moved += count
        self.end_move(slot, source, target)
        return moved

    def begin_move(self, slot: int, source: Server, target: Server) -> None:
        target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", self.ids[source])
        source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", self.ids[target])

    def move_keys(self, slot: int, source: Server, target: Server, count: int) -> int:
        """Move up to `count` keys; returns how many."""
        keys = source.call("CLUSTER", "GETKEYSINSLOT", slot, count)
        self.move_named(source, target, *keys)
        return len(keys)

    def move_named(self, source: Server, target: Server, *keys: str) -> None:
        if keys:
            source.call("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)

    def end_move(self, slot: int, source: Server, target: Server) -> None:
        others = [p for p in self.primaries if p not in (source, target)]
        for server in (target, source, *others):
            server.call("CLUSTER", "SETSLOT", slot, "NODE", self.ids[target])
        # A node takes an epoch without asking the others; until all have heard of it, a second
        # move could take the same one, and then they never agree whose the slot is.
        until(self._agreed, 20, "all nodes agree who serves what")

    def _agreed(self) -> bool:
        views = set()
        for server in self.servers:
            if server.runs:
                nodes = [n.split(" ") for n in server.call("CLUSTER", "NODES").splitlines()]
                views.add(
                    frozenset(
                        (n[0], n[6], *[part for part in n[8:] if not part.startswith("[")])
                        for n in nodes
                        if "master" in n[2] and "fail" not in n[2]
                    )
                )
        return len(views) == 1

    def all_keys(self) -> Iterator[str]:
        """Every key of every primary."""
        for server in self.primaries:
            yield from server.call("KEYS", "*")

    def fail_over(self, primary: Server, *, settled: bool) -> Server:
        """Kill a primary and wait until its replica has taken its place; returns that.

        Args:
            primary: who is killed.
            settled: whether its replica first gets everything that was acknowledged.
        """
        replica = self.replicas[self.primaries.index(primary)]
        if settled:
            settle(primary, replica)
        primary.kill()
        until(lambda: replica.info("replication")["role"] == "master", 30, "the replica takes over")
        place = self.primaries.index(primary)
        self.primaries[place], self.replicas[place] = replica, primary
        return replica


def _holds(part: str, slot: int) -> bool:
    if part.startswith("["):
        return False
    first, _, last = part.partition("-")
    return int(first) <= slot <= int(last or first)


class Sentinels(_Group):
    """A primary, its replica, and three Sentinels that watch them.

    Args:
        options: more of the two servers' options.
    """

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        settings = {"repl-ping-replica-period": 1, **(options or {})}
        self.primary = Server(settings)
        self.replica = Server(settings)
        watch = (
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.primary.port} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {SERVICE} 5000\n"
        )
        self.sentinels = [Server(config=watch) for _ in range(3)]
        self.servers = [self.primary, self.replica, *self.sentinels]

    @property
    def url(self) -> str:
        """A URL that names all Sentinels."""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}/0"

    def start(self) -> None:
        self.primary.start()
        self.replica.start(replicaof=f"127.0.0.1 {self.primary.port}")
        until(lambda: self.replica.info("replication")["master_link_status"] == "up", 20,
              "the replica follows")  # fmt: skip
        until(lambda: "state=online" in self.primary.info("replication")["slave0"], 20,
              "the primary counts its replica")  # fmt: skip
        for sentinel in self.sentinels:
            sentinel.start()
        for sentinel in self.sentinels:
            until(lambda s=sentinel: "slaves=1,sentinels=3" in s.call("INFO", "sentinel"), 20,
                  f"{sentinel} knows the others")  # fmt: skip

    def named(self, sentinel: Server) -> int:
        """Port of the primary that a Sentinel names."""
        return int(sentinel.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])

    def fail_over(self, *, settled: bool) -> None:
        """Kill the primary and wait until the replica has taken its place; they change names."""
        if settled:
            settle(self.primary, self.replica)
        self.primary.kill()
        self.primary, self.replica = self.replica, self.primary
        until(lambda: self.primary.info("replication")["role"] == "master", 40,
              "the replica takes over")  # fmt: skip
        for sentinel in self.sentinels:
            until(lambda s=sentinel: self.named(s) == self.primary.port, 20,
                  f"{sentinel} names the new primary")  # fmt: skip

    def bring_back(self) -> None:
        """Start the killed server again, now as the replica."""
        self.replica.start(replicaof=f"127.0.0.1 {self.primary.port}")
        until(lambda: self.replica.info("replication")["master_link_status"] == "up", 20,
              "the old primary follows")  # fmt: skip


# What the tests of clusters and Sentinels share


def names_over(count: int, partitions: int) -> list[str]:
    """Names of sessions, spread evenly over the partitions."""
    room = dict.fromkeys(range(partitions), -(-count // partitions))
    names = []
    for k in itertools.count():
        name = f"mic-{k}/left"
        if room[partition_of(name, partitions)]:
            room[partition_of(name, partitions)] -= 1
            names.append(name)
        if len(names) == count:
            return names
    raise AssertionError


class Producer(threading.Thread):
    """Streams pushed from a thread of its own, as a producer would.

    `counted` is how many replies have come; `error` what ended it early.
    """

    def __init__(self, url: str, app: str, streams: dict[str, Any], **settings: Any) -> None:
        super().__init__(daemon=True)
        self.url, self.app, self.streams = url, app, streams
        self.patience_s = settings.pop("patience_s", 30.0)
        self.window = settings.pop("window", 4)
        self.settings = settings
        self.counted = 0
        self.replies: dict[str, list[Reply]] = {}
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with Client(
                self.url, self.app, window=self.window, patience_s=self.patience_s
            ) as client:
                client.run(self.streams, on_reply=self._count, **self.settings)
        except BaseException as error:
            self.error = error

    def _count(self, session: str, reply: Reply) -> None:
        self.counted += 1
        self.replies.setdefault(session, []).append(reply)

    def finish(self, timeout_s: float = 60.0) -> dict[str, list[Reply]]:
        """Wait for the last reply; all of them by session."""
        self.join(timeout_s)
        assert not self.is_alive(), f"{self.counted} replies, and it has not ended"
        if self.error:
            raise self.error
        return self.replies


def assert_same(
    replies: dict[str, list[Reply]], calm: dict[str, list[Reply]], names: Iterable[str] = ()
) -> None:
    """One reply a frame: none lost, none twice, in order, and the same bits."""
    assert replies.keys() == calm.keys()
    for name in names or calm:
        ids = [reply.id for reply in replies[name]]
        assert len(ids) == len(calm[name]), f"{name}: lost or twice"
        assert ids == sorted(set(ids)), f"{name}: out of order"
        for got, expected in zip(replies[name], calm[name], strict=True):
            assert got.error is None
            for key, value in expected.output.items():
                np.testing.assert_array_equal(got.output[key], value, err_msg=f"{name} {got.id}")
