"""Process to process: a worker that holds a version serves its shards to others.

A request is a length (4 bytes, big-endian) and a msgpack map `token`, `version`, `tensor`,
`offset`, `extent`; the answer a length (8 bytes) and so many bytes, or the length 2^64 - 1 for "not
here" or 2^64 - 2 for "not now".
Only who can read the app's catalogue knows a worker's token, and what comes is compared with the
manifest's digest like anything else.
"""

from __future__ import annotations

import hmac
import logging
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgpack

from slotstream_worker.weights.boxes import Box
from slotstream_worker.weights.errors import ShardGone
from slotstream_worker.weights.manifest import Shard, Tensor
from slotstream_worker.weights.transports.base import Tick

log = logging.getLogger(__name__)

AT_A_TIME = 2
"""Transfers a worker serves at a time; who comes then asks another, or waits."""
_TIMEOUT_S = 10.0
_PIECE_BYTES = 2**20
_NONE, _BUSY = 2**64 - 1, 2**64 - 2
_BUSY_WAIT_S, _LONGEST_WAIT_S = 0.05, 60.0
_LONGEST_REQUEST = 64 * 1024
_EVERY = ("0.0.0.0", "::")  # noqa: S104 (compared with, not bound to)

Provide = Callable[[str, str, Box], memoryview | None]
"""A version's bytes of a box of a tensor, as published; None where they are not here."""


class Peer(NamedTuple):
    """A worker that serves: where, and what it wants to hear first."""

    worker: str
    host: str
    port: int
    token: str


class Peers:
    """Reads shards of one version from workers that hold it."""

    kind, artifact = "peer", "shard"

    def __init__(self, version: str, find: Callable[[], Sequence[Peer]]) -> None:
        self._version, self._find = version, find
        self._peers = list(find())
        self._failed: set[str] = set()
        self._waits_until = time.monotonic() + _LONGEST_WAIT_S
        self._socket: socket.socket | None = None

    def has(self, tensor: Tensor, shard: Shard) -> bool:  # noqa: ARG002 (they hold all of it)
        """See `Transport.has`."""
        return bool(self._peers)

    def read(self, tensor: Tensor, shard: Shard, into: memoryview, tick: Tick) -> None:
        """See `Transport.read`. A worker that fails is not asked again."""
        reason: object = "no worker holds it"
        while self._peers:
            try:
                if self._read(tensor, shard, into, tick):
                    return
                reason = f"{self._peers[0].worker} does not serve it"
                break  # as published it is nowhere: cast on the way in, or gone since
            except Busy:
                reason = "all who hold it serve others"
                self.close()
                if time.monotonic() > self._waits_until:
                    break
                tick()
                time.sleep(_BUSY_WAIT_S)
                # Who was served meanwhile may serve too.
                self._peers = [p for p in self._find() if p.worker not in self._failed]
            except OSError as error:
                reason = f"{self._peers[0].worker}: {error}"
                self.close()
                self._failed.add(self._peers.pop(0).worker)
        raise ShardGone(f"{tensor.name}{shard.box}: {reason}")

    def _read(self, tensor: Tensor, shard: Shard, into: memoryview, tick: Tick) -> bool:
        peer = self._peers[0]
        if self._socket is None:
            self._socket = socket.create_connection((peer.host, peer.port), _TIMEOUT_S)
        request = msgpack.packb({
            "token": peer.token, "version": self._version, "tensor": tensor.name,
            "offset": list(shard.box.offset), "extent": list(shard.box.extent),
        })  # fmt: skip
        self._socket.sendall(struct.pack(">I", len(request)) + request)
        head = bytearray(8)
        _fill(self._socket, memoryview(head), lambda: None)
        (length,) = struct.unpack(">Q", head)
        if length == _BUSY:
            raise Busy("it serves others")
        if length == _NONE:
            return False
        if length != len(into):
            raise OSError(f"{length:,} bytes came, and {len(into):,} were expected")
        _fill(self._socket, into, tick)
        return True

    def close(self) -> None:
        """See `Transport.close`."""
        if self._socket:
            self._socket.close()
            self._socket = None


class PeerServer:
    """Serves what `provide` gives, from threads. Opened by `start`.

    Args:
        host: the address to listen on; also what others are told, or this machine's name where it
            is every address.
        port: 0 for any that is free.
        token: what a request must know.
        provide: where the bytes are.
    """

    def __init__(self, host: str, port: int, token: str, provide: Provide) -> None:
        self.host = socket.gethostname() if host in _EVERY else host
        self.token, self.served_bytes = token, 0
        self._provide, self._bind, self._port = provide, host, port
        self._places = threading.BoundedSemaphore(AT_A_TIME)
        self._server: socketserver.ThreadingTCPServer | None = None

    @property
    def port(self) -> int:
        """Where it listens; 0 before `start`."""
        return int(self._server.server_address[1]) if self._server else 0

    def start(self) -> None:
        """Listen; raises `OSError` where the address cannot be had."""
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                outer.serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address, daemon_threads = True, True
            address_family = socket.AF_INET6 if ":" in outer._bind else socket.AF_INET

            def handle_error(self, request: Any, client_address: Any) -> None:
                del request
                log.debug("serving weights to %s failed", client_address, exc_info=True)

        self._server = Server((self._bind, self._port), Handler)
        threading.Thread(target=self._server.serve_forever, name="peers", daemon=True).start()

    def stop(self) -> None:
        """Listen no more."""
        if self._server:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def serve(self, connection: socket.socket) -> None:
        """Answer one connection's requests until it ends; a stranger's is cut."""
        connection.settimeout(_TIMEOUT_S)
        if not self._places.acquire(blocking=False):
            # After the request: an answer to one that was not read may be lost with it.
            connection.recv(_LONGEST_REQUEST)
            connection.sendall(struct.pack(">Q", _BUSY))
            return
        try:
            while self._answer(connection):
                pass
        except (OSError, ValueError, TypeError, KeyError, msgpack.UnpackException):
            return
        finally:
            self._places.release()

    def _answer(self, connection: socket.socket) -> bool:
        head = bytearray(4)
        try:
            _fill(connection, memoryview(head), lambda: None)
        except Cut:
            return False
        (length,) = struct.unpack(">I", head)
        if length > _LONGEST_REQUEST:
            return False
        raw = bytearray(length)
        _fill(connection, memoryview(raw), lambda: None)
        asked = msgpack.unpackb(bytes(raw))
        if not hmac.compare_digest(str(asked["token"]).encode(), self.token.encode()):
            return False
        box = Box(tuple(map(int, asked["offset"])), tuple(map(int, asked["extent"])))
        data = self._provide(str(asked["version"]), str(asked["tensor"]), box)
        connection.sendall(struct.pack(">Q", _NONE if data is None else len(data)))
        for at in range(0, len(data) if data else 0, _PIECE_BYTES):
            assert data is not None  # noqa: S101 (the loop is empty otherwise)
            connection.sendall(data[at : at + _PIECE_BYTES])
        self.served_bytes += len(data) if data else 0
        return True


class Busy(OSError):
    """The worker serves as many as it does at a time."""


class Cut(OSError):
    """The other end has closed the connection."""


def _fill(connection: socket.socket, into: memoryview, tick: Tick) -> None:
    at = 0
    while at < len(into):
        count = connection.recv_into(into[at : at + _PIECE_BYTES])
        if not count:
            raise Cut("the connection was closed")
        at += count
        tick()
