"""Commands to Redis that may be repeated, and so are, through an outage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis

from slotstream.connect import connect

T = TypeVar("T")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0
_PASSING = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.BusyLoadingError,
    redis.ReadOnlyError,
    redis.OutOfMemoryError,
)


class Link:
    """A producer's connections to one Redis.

    Args:
        url: of the server.
        patience_s: how long an outage is waited out before its error is raised.
    """

    def __init__(self, url: str, patience_s: float) -> None:
        self.redis: Any = connect(url, name="slotstream-producer")
        self.patience_s = patience_s

    def patiently(self, act: Callable[[], T]) -> T:
        """Do what may be repeated, again and again through an outage of `patience_s` at most."""
        deadline, wait_s = time.monotonic() + self.patience_s, _FIRST_WAIT_S
        while True:
            try:
                return act()
            except _PASSING:
                if time.monotonic() > deadline:
                    raise
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def call(self, *command: Any) -> Any:
        """A command's answer as Redis gave it, without the client library's reading of it."""
        return self.patiently(lambda: self._call(command))

    def calls(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Answers of many commands in one round trip; raises the first refusal."""

        def send() -> list[Any]:
            pipeline = self.redis.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = pipeline.execute()
            return answers

        return self.patiently(send) if commands else []

    def _call(self, command: Sequence[Any]) -> Any:
        connection = self.redis.connection_pool.get_connection()
        try:
            connection.send_command(*command)
            return connection.read_response()
        except redis.ResponseError:
            raise  # a whole answer, which says no
        except BaseException:
            # Half an answer may still be on its way: nobody must read it as another's.
            connection.disconnect()
            raise
        finally:
            self.redis.connection_pool.release(connection)
