"""One connection to Redis that sends now and receives later, and says so when it breaks.

A client library hides reconnection; what is built here cannot have it hidden (tracking is a
property of the connection, and a command whose answer was lost may have been carried out), so
a broken line stays broken: its owner opens a new one and knows what that means.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import NoScriptError, ResponseError

Arg = bytes | str | int | float


@dataclass(frozen=True)
class Script:
    """A Lua script and its SHA-1, by which Redis calls it."""

    name: str
    text: str

    @property
    def sha(self) -> str:
        """Digest Redis knows the script by."""
        return hashlib.sha1(self.text.encode()).hexdigest()  # noqa: S324 (Redis's own choice)


class Line:
    """One connection. Raises `redis.ConnectionError` or `TimeoutError` once broken, for good."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._connection: Any = pool.make_connection()
        self._connection.connect()
        self._broken = False
        self._shas: dict[str, str] = {}

    def send(self, *command: Arg) -> None:
        """Send one command; its answer is read by `receive`, in order."""
        self._send(self._connection.pack_command(*command))

    def _send(self, packed: Iterable[bytes]) -> None:
        if self._broken:  # the library would quietly connect again
            raise redis.ConnectionError("this connection has been broken; open a new one")
        try:
            self._connection.send_packed_command(packed, check_health=False)
        except BaseException:
            self.close()
            raise

    def receive(self) -> Any:
        """Read the next answer; raises `ResponseError` where Redis refused the command."""
        try:
            return self._connection.read_response()
        except ResponseError:
            raise  # an answer like another
        except BaseException:
            self.close()
            raise

    def call(self, *command: Arg) -> Any:
        """Send one command and read its answer."""
        self.send(*command)
        return self.receive()

    def calls(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """Send many commands at once; the answers in order, a refusal as the exception itself."""
        if not commands:
            return []
        self._send(self._connection.pack_commands(commands))
        answers: list[Any] = []
        for _ in commands:
            try:
                answers.append(self.receive())
            except ResponseError as error:
                answers.append(error)
        return answers

    def script(self, script: Script, keys: Sequence[Arg], args: Sequence[Arg]) -> Any:
        """Run a script by its digest; one that Redis does not know (any more) is sent whole.

        A restarted or promoted Redis has forgotten every script, so this may happen at any call.
        Nothing was carried out where Redis answers that it does not know the script.
        """
        sha = self._shas.get(script.name)
        if sha is None:
            sha = self._shas[script.name] = script.sha
        try:
            return self.call("EVALSHA", sha, len(keys), *keys, *args)
        except NoScriptError:
            return self.call("EVAL", script.text, len(keys), *keys, *args)

    def readable(self, timeout_s: float) -> bool:
        """Whether an answer or a message can be read within `timeout_s`."""
        if self._broken:  # the library would quietly connect again, untracked
            raise redis.ConnectionError("this connection has been broken; open a new one")
        return bool(self._connection.can_read(timeout_s))

    def close(self) -> None:
        """Close the connection; harmless when it is closed already."""
        self._broken = True
        self._connection.disconnect()

    def fileno(self) -> int:
        """The socket's file descriptor, for waiting on several lines at once."""
        return int(self._connection._sock.fileno())
