"""Where an app's keys are: one server, the nodes of a cluster, or whoever a Sentinel names.

    redis://host:6379/0, rediss://... (TLS), unix:///path
    redis+cluster://host:6379             any node of a Redis Cluster (rediss+cluster with TLS)
    redis+sentinel://h1:26379,h2:26379/NAME/0      the primary that the Sentinels call NAME

Nothing is followed behind the caller's back: a key that has moved, or a primary that is one no
more, is an error like a broken connection, and `forget` makes the next look-up a fresh one.
"""

from __future__ import annotations

import binascii
import re
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AskError, AuthorizationError, ClusterDownError, TryAgainError
from redis.retry import Retry

CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 15.0
MAX_BLOCK_S = 5.0
"""The longest a blocking read blocks: less than the socket timeout, so that silence is an error."""

_SLOTS = 16384


def hash_slot(key: str) -> int:
    """Redis Cluster's slot of a key: CRC16 of what stands between its first `{` and `}`."""
    start = key.find("{")
    if start >= 0:
        end = key.find("}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return binascii.crc_hqx(key.encode(), 0) % _SLOTS


class Endpoint:
    """The server, or servers, that a URL names. Opens nothing before `pool` is asked.

    Args:
        url: see the module.
        name: what the connections call themselves in `CLIENT LIST`.
    """

    def __init__(self, url: str, *, name: str = "slotstream") -> None:
        scheme, _, rest = url.partition("://")
        base, _, self.kind = scheme.partition("+")
        if self.kind not in ("", "cluster", "sentinel") or not rest:
            raise ValueError(
                f"a Redis URL is redis://, rediss://, unix://, redis+cluster:// or "
                f"redis+sentinel://, got {url!r}"
            )
        self.url, self._name, self._base = url, name, base
        self._sentinels: list[tuple[str, int]] = []
        if self.kind == "sentinel":
            credentials, at, hosts = rest.rpartition("@")
            hosts, _, path = hosts.partition("/")
            path, _, query = path.partition("?")
            self.service, _, db = path.partition("/")
            if not self.service:
                raise ValueError(
                    "a Sentinel URL ends with the primary's name: "
                    f"redis+sentinel://host:26379/NAME, got {url!r}"
                )
            for host in hosts.split(","):
                address, _, port = host.partition(":")
                self._sentinels.append((address, int(port or 26379)))
            query = f"?{query}" if query else ""
            rest = f"{credentials}{at}localhost/{db or 0}{query}"
            self._watcher = f"{base}://localhost{query}"  # Sentinels: with TLS as well, no password
        self._plain = f"{base}://{rest}"
        self._pools: dict[tuple[str, int] | None, redis.ConnectionPool] = {}
        self._nodes: list[tuple[int, int, tuple[str, int]]] | None = None
        self._primary: tuple[str, int] | None = None
        self._turn = 0  # whom to ask first: another after each `forget`, since one may be cut off
        _pool(self._plain, name)  # a URL that cannot be read fails here, not in an outage

    @property
    def cluster(self) -> bool:
        """Whether keys lie on different servers."""
        return self.kind == "cluster"

    def pool(self, key: str) -> redis.ConnectionPool:
        """Connections to the server that holds `key` now.

        Binary replies, RESP2, and no retries of the client library's own: a command whose answer
        was lost may have been carried out, and only the caller knows whether to repeat it.

        Raises:
            redis.ConnectionError: nobody says where it is.
        """
        if self.kind == "cluster":
            return self._at(self._node(hash_slot(key)))
        if self.kind == "sentinel":
            # Another thread may forget it meanwhile.
            primary = self._primary or self._ask_sentinels()
            self._primary = primary
            return self._at(primary)
        return self._at(None)

    def forget(self) -> None:
        """Look up anew who holds what; connections that are open stay open."""
        self._nodes = self._primary = None
        self._turn += 1

    def close(self) -> None:
        """Close all connections."""
        for pool in list(self._pools.values()):
            pool.disconnect()

    def _at(self, address: tuple[str, int] | None) -> redis.ConnectionPool:
        if address not in self._pools:
            self._pools[address] = _pool(self._plain, self._name, address)
        return self._pools[address]

    def _node(self, slot: int) -> tuple[str, int]:
        nodes = self._nodes  # another thread may forget them meanwhile
        if nodes is None:
            nodes = self._nodes = self._ask_cluster()
        for first, last, address in nodes:
            if first <= slot <= last:
                return address
        self._nodes = None
        raise redis.ConnectionError(f"no node of the cluster serves slot {slot}")

    def _ask_cluster(self) -> list[tuple[int, int, tuple[str, int]]]:
        """Slot ranges and their primaries, by whichever known node answers first."""
        reason: Exception | None = None
        known = [address for address in list(self._pools) if address is not None]
        for address in [*_turned(known, self._turn), None]:
            try:
                answer = _ask(self._at(address), "CLUSTER", "SLOTS")
            except (redis.RedisError, OSError) as error:
                if not passes(error):
                    raise
                reason = error
                continue
            # A node that does not know its own address leaves it out: it is the one asked.
            asked = self._at(address).connection_kwargs["host"]
            return [
                (int(first), int(last), ((primary[0] or b"").decode() or asked, int(primary[1])))
                for first, last, primary, *_ in answer
            ]
        raise redis.ConnectionError(f"no node of the cluster answers: {reason}")

    def _ask_sentinels(self) -> tuple[str, int]:
        reason: Exception | str = "none was named"
        for address in _turned(self._sentinels, self._turn):
            pool = _pool(self._watcher, self._name, address)
            try:
                found = _ask(pool, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
                if found:
                    return found[0].decode(), int(found[1])
                reason = f"it knows no {self.service!r}"
            except (redis.RedisError, OSError) as error:
                reason = error
            finally:
                pool.disconnect()
        raise redis.ConnectionError(f"no Sentinel names a primary {self.service!r}: {reason}")


def _turned(addresses: list[tuple[str, int]], turn: int) -> list[tuple[str, int]]:
    start = turn % max(len(addresses), 1)
    return addresses[start:] + addresses[:start]


def _ask(pool: redis.ConnectionPool, *command: str) -> Any:
    connection: Any = pool.make_connection()
    try:
        connection.connect()
        connection.send_command(*command)
        return connection.read_response()
    finally:
        connection.disconnect()


def _pool(url: str, name: str, address: tuple[str, int] | None = None) -> redis.ConnectionPool:
    # Defaults of the client library differ between its versions (socket timeout, protocol,
    # retries), and each of them has lost somebody data: so they are set here, once.
    tcp: dict[str, Any] = {} if url.startswith("unix:") else {"socket_keepalive": True}
    pool = redis.ConnectionPool.from_url(
        url,
        **tcp,
        # The pool counts every connection it ever made for a line, and those are not given back.
        max_connections=2**31,
        protocol=2,
        decode_responses=False,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        health_check_interval=0,
        retry=Retry(NoBackoff(), 0),
        client_name=name,
    )
    if address is not None:
        pool.connection_kwargs.update(host=address[0], port=address[1])
    return pool


_PASSING = (
    *(redis.ConnectionError, redis.TimeoutError, OSError),
    *(redis.BusyLoadingError, redis.ReadOnlyError, redis.OutOfMemoryError),
    *(AskError, TryAgainError, ClusterDownError),
)
# Those that the client library has no type for; a script of Redis 6.2 wraps them in its own text.
_WORDS = "LOADING|READONLY|OOM|MISCONF|MASTERDOWN|NOREPLICAS|BUSY|CLUSTERDOWN|TRYAGAIN|UNBLOCKED"
_CONDITION = re.compile(rf"(^|-)({_WORDS})\b")


def passes(error: BaseException) -> bool:
    """Whether an error is a condition that passes by itself: nothing is lost by waiting."""
    if isinstance(error, redis.AuthenticationError | AuthorizationError):
        return False  # the library makes wrong credentials a connection error
    if isinstance(error, _PASSING):
        return True
    return isinstance(error, redis.ResponseError) and bool(_CONDITION.search(str(error)))
