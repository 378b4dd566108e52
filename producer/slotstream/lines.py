"""One connection to Redis that sends now and receives later, and says so when it breaks.

A client library hides reconnection; what is built here cannot have it hidden (tracking is a
property of the connection, and a command whose answer was lost may have been carried out), so
a broken line stays broken: its owner opens a new one and knows what that means.
"""

from __future__ import annotations

import hashlib
import select
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import hiredis
import redis
from redis.exceptions import NoScriptError, ResponseError

from slotstream.arguments import Arg, Arguments

_NOTHING = object()


@dataclass(frozen=True)
class Script:
    """A Lua script and its SHA-1, by which Redis calls it."""

    name: str
    text: str

    @property
    def sha(self) -> str:
        """Digest Redis knows the script by."""
        return hashlib.sha1(self.text.encode()).hexdigest()  # noqa: S324 (Redis's own choice)


def _packed(command: tuple[Arg, ...], more: Arguments | None = None) -> bytes:
    """A command's bytes; `more` are its last arguments."""
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]  # it takes any mixture
    if more is None:
        return packed
    rest = packed[packed.index(b"\n") + 1 :]
    return b"".join([b"*%d\r\n" % (len(command) + more.count), rest, *more.parts])


class Line:
    """One connection. Raises `redis.ConnectionError` or `TimeoutError` once broken, for good.

    The client library connects (addresses, TLS, credentials); after that the line reads and
    writes its socket itself, since it must know what has come without waiting for it, and since
    tens of thousands of small messages a second pass here.

    Args:
        pool: what makes the connection.
        read_bytes: the most that is read at a time.
    """

    def __init__(self, pool: redis.ConnectionPool, *, read_bytes: int = 64 * 1024) -> None:
        connection: Any = pool.make_connection()
        connection.connect()
        self._connection = connection
        self._socket: Any = connection._sock
        self._reader = hiredis.Reader(
            protocolError=redis.InvalidResponse,
            replyError=connection._parser.parse_error,
            notEnoughData=_NOTHING,
        )
        self._buffer = bytearray(read_bytes)
        self._next: Any = _NOTHING  # an answer that has been seen to be there
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._broken = False
        self._shas: dict[str, str] = {}

    def send(self, *command: Arg) -> None:
        """Send one command; its answer is read by `receive`, in order."""
        self._send(_packed(command))

    def send_all(self, commands: Iterable[Sequence[Arg]]) -> None:
        """Send many commands at once; each has its answer, in order."""
        self._send(b"".join([_packed(tuple(command)) for command in commands]))

    def _send(self, packed: bytes) -> None:
        if self._broken:
            raise redis.ConnectionError("this connection has been broken; open a new one")
        try:
            self._socket.sendall(packed)
        except TimeoutError as error:
            self.close()
            raise redis.TimeoutError("Redis takes nothing in") from error
        except OSError as error:
            self.close()
            raise redis.ConnectionError(f"writing to Redis: {error}") from error

    def receive(self) -> Any:
        """Read the next answer; raises `ResponseError` where Redis refused the command."""
        answer, self._next = self._next, _NOTHING
        try:
            if answer is _NOTHING:
                answer = self._gets()
            while answer is _NOTHING:
                self._fill()
                answer = self._gets()
        except BaseException:
            self.close()
            raise
        if isinstance(answer, Exception):
            if not isinstance(answer, ResponseError):
                self.close()  # Redis says that it is not there: it is loading, or full
            raise answer
        return answer

    def ready(self, timeout_s: float = 0.0, *, readable: bool = False) -> bool:
        """Whether a whole answer or message is there, or comes within `timeout_s`.

        `readable`: somebody has asked already, and the socket has something to read.
        """
        if self._next is not _NOTHING:
            return True
        try:
            self._next = self._gets()
            while self._next is _NOTHING:
                if not (readable or self._poll.poll(1e3 * timeout_s) or self._unread()):
                    return False
                readable = False
                self._fill()
                self._next = self._gets()
        except BaseException:
            self.close()
            raise
        return True

    def _gets(self) -> Any:
        if self._broken:
            raise redis.ConnectionError("this connection has been broken; open a new one")
        return self._reader.gets()

    def _fill(self) -> None:
        """Read what the socket has, at least one byte."""
        try:
            count = self._socket.recv_into(self._buffer)
        except TimeoutError as error:
            raise redis.TimeoutError("Redis does not answer") from error
        except OSError as error:
            raise redis.ConnectionError(f"reading from Redis: {error}") from error
        if not count:
            raise redis.ConnectionError("Redis has closed the connection")
        self._reader.feed(self._buffer, 0, count)  # type: ignore[arg-type]  # any buffer

    def _unread(self) -> bool:
        """Whether TLS holds bytes that the socket does not show any more."""
        pending = getattr(self._socket, "pending", None)
        return bool(pending and pending())

    def call(self, *command: Arg) -> Any:
        """Send one command and read its answer."""
        self.send(*command)
        return self.receive()

    def calls(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """Send many commands at once; the answers in order, a refusal as the exception itself."""
        if not commands:
            return []
        self.send_all(commands)
        answers: list[Any] = []
        for _ in commands:
            try:
                answers.append(self.receive())
            except ResponseError as error:
                answers.append(error)
        return answers

    def send_script(
        self,
        script: Script,
        keys: Sequence[Arg],
        args: Sequence[Arg],
        more: Arguments | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """Send a script by its digest, or `whole`, with its text; `more` are its last arguments.

        `receive` raises `NoScriptError` where Redis does not know the digest. A restarted or
        promoted Redis has forgotten every script, so this may happen at any call. Nothing was
        carried out then, and the script is sent again, whole.
        """
        sha = self._shas.get(script.name)
        if sha is None:
            sha = self._shas[script.name] = script.sha
        how = ("EVAL", script.text) if whole else ("EVALSHA", sha)
        self._send(_packed((*how, len(keys), *keys, *args), more))

    def script(self, script: Script, keys: Sequence[Arg], args: Sequence[Arg]) -> Any:
        """Run a script, by its digest where Redis knows it, and return its answer."""
        self.send_script(script, keys, args)
        try:
            return self.receive()
        except NoScriptError:
            self.send_script(script, keys, args, whole=True)
            return self.receive()

    def close(self) -> None:
        """Close the connection; harmless when it is closed already."""
        self._broken = True
        self._connection.disconnect()

    def fileno(self) -> int:
        """The socket's file descriptor, for waiting on several lines at once."""
        return int(self._socket.fileno())
