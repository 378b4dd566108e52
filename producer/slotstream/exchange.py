"""Commands that are packed already, and their answers by the thousand.

The client library spends microseconds on each command and on each answer. Where entries go by the
hundred thousand a second, their commands are joined from bytes made once, and the answers are
taken from the parser (hiredis, in C) in one loop. Connecting, passwords, TLS and what an error is
called stay the library's.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import hiredis
import redis
from redis.connection import DefaultParser

_READ_BYTES = 2**18


class Exchange:
    """One connection of a pool, held while commands are sent and answered.

    Leaving it gives the connection back; one with answers still to come is closed, so that
    nobody reads them as another's.
    """

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._pool: Any = pool
        self._connection: Any = pool.get_connection()
        self._reader = hiredis.Reader(
            protocolError=redis.InvalidResponse, replyError=DefaultParser.parse_error
        )
        self._missing = 0

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(broken=error is not None)

    def close(self, *, broken: bool = False) -> None:
        """Give the connection back; one that is broken, or has answers to come, is closed."""
        if broken or self._missing:
            self._connection.disconnect()
        self._pool.release(self._connection)

    def fileno(self) -> int:
        """The socket's file descriptor, for waiting on several at once."""
        return int(self._connection._sock.fileno())

    def send(self, packed: bytes, answers: int) -> None:
        """Send packed commands, to which so many answers will come."""
        self._missing += answers
        self._connection.send_packed_command([packed], check_health=False)

    def receive(self, answers: list[Any]) -> None:
        """Add all answers still to come to a list; a refusal is the exception in its place.

        Raises:
            redis.ConnectionError, OSError: the connection broke; what came before is in the list.
        """
        socket, reader = self._connection._sock, self._reader
        while self._missing:
            data = socket.recv(_READ_BYTES)
            if not data:
                raise redis.ConnectionError("the server closed the connection")
            reader.feed(data)
            before = len(answers)
            while (answer := reader.gets()) is not False:
                answers.append(answer)
            self._missing -= len(answers) - before
