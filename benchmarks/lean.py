"""A connection to Redis with nothing on it: a socket, and hiredis to pack and parse.

The instruments (the wire bound, the echo, the driver) use it, so that what they cost is what
Redis and the kernel cost.
"""

from __future__ import annotations

import hashlib
import socket
from typing import Any
from urllib.parse import urlsplit

import hiredis

Arg = bytes | str | int


def pack(*command: Arg) -> bytes:
    """A command's bytes."""
    packed: bytes = hiredis.pack_command(command)
    return packed


class Connection:
    """A connection to `redis://host:port/db`. `send` and `receive` are apart, for pipelining."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 6379))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()
        if database := parts.path.strip("/"):
            self.call("SELECT", database)

    def send(self, packed: bytes) -> None:
        """Send commands that were packed."""
        self._socket.sendall(packed)

    def receive(self) -> Any:
        """The next answer; raises a refusal."""
        while (answer := self._reader.gets()) is False:
            self._feed()
        return _checked(answer)

    def ready(self) -> list[Any]:
        """All whole answers of what can be read now; called when the socket is readable."""
        self._feed()
        answers = []
        while (answer := self._reader.gets()) is not False:
            answers.append(_checked(answer))
        return answers

    def call(self, *command: Arg) -> Any:
        """Send a command and receive its answer."""
        self.send(pack(*command))
        return self.receive()

    def script(self, text: str) -> bytes:
        """Load a script; returns what EVALSHA calls it by."""
        self.call("SCRIPT", "LOAD", text)
        return hashlib.sha1(text.encode()).hexdigest().encode()

    def fileno(self) -> int:
        """The socket, for select."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _feed(self) -> None:
        data = self._socket.recv(1 << 18)
        if not data:
            raise ConnectionError("Redis closed the connection")
        self._reader.feed(data)


def _checked(answer: Any) -> Any:
    if isinstance(answer, hiredis.ReplyError):
        raise RuntimeError(f"Redis refused a command of the benchmark: {answer}")
    return answer
