"""Commands to Redis that may be repeated, and so are, through an outage."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis

from slotstream.endpoint import Endpoint, passes

T = TypeVar("T")
Command = tuple[Any, ...]

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0
_KEY_AT = {"EVAL": 3, "XINFO": 2}
"""Where a command's first key stands, when it is not its first argument."""


class Link:
    """A producer's connections to Redis, each command sent to the server that holds its key.

    Args:
        url: of the server; see `endpoint`.
        patience_s: how long an outage is waited out before its error is raised.
    """

    def __init__(self, url: str, patience_s: float) -> None:
        self.endpoint = Endpoint(url, name="slotstream-producer")
        self.patience_s = patience_s

    def client(self, key: str) -> Any:
        """The client library's own object for the server that holds `key` now."""
        return redis.Redis(connection_pool=self.endpoint.pool(key))

    def close(self) -> None:
        """Close the connections."""
        self.endpoint.close()

    def patiently(self, act: Callable[[], T]) -> T:
        """Do what may be repeated, again and again through an outage of `patience_s` at most."""
        deadline, wait_s = time.monotonic() + self.patience_s, _FIRST_WAIT_S
        while True:
            try:
                return act()
            except (redis.RedisError, OSError) as error:
                if not passes(error) or time.monotonic() > deadline:
                    raise
                self.endpoint.forget()
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def call(self, *command: Any, key: str | None = None) -> Any:
        """A command's answer as Redis gave it, without the client library's reading of it.

        `key` says which server to ask, for a command whose first key does not stand where it
        usually does.
        """
        return self.patiently(lambda: self.once(*command, key=key))

    def calls(self, commands: Sequence[Command]) -> list[Any]:
        """Answers of many commands, in few round trips; raises the first refusal."""
        done: dict[int, Any] = {}
        answers = self.patiently(lambda: self.try_calls(commands, done))
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def try_calls(
        self, commands: Sequence[Command], done: dict[int, Any] | None = None
    ) -> list[Any]:
        """Send many commands once; a refusal is the exception in its place.

        Raises what passes (an outage), after which all of them may be sent again. `done`, where it
        is given, keeps the answers that came, by their places; those are not sent again.
        """
        done = {} if done is None else done
        by_pool: dict[redis.ConnectionPool, list[int]] = defaultdict(list)
        for k, command in enumerate(commands):
            if k not in done:
                by_pool[self.endpoint.pool(key_of(command))].append(k)
        outage: Exception | None = None
        for pool, places in by_pool.items():
            pipeline: Any = redis.Redis(connection_pool=pool).pipeline(transaction=False)
            for k in places:
                pipeline.execute_command(*commands[k])
            for k, answer in zip(places, pipeline.execute(raise_on_error=False), strict=True):
                if isinstance(answer, Exception) and passes(answer):
                    outage = answer
                else:
                    done[k] = answer
        if outage is not None:
            raise outage
        return [done[k] for k in range(len(commands))]

    def once(self, *command: Any, key: str | None = None) -> Any:
        """`call`, without trying again."""
        pool: Any = self.endpoint.pool(key_of(command) if key is None else key)
        connection = pool.get_connection()
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
            pool.release(connection)


def key_of(command: Command) -> str:
    """A command's first key."""
    if command[0] == "XREAD":
        key = command[command.index("STREAMS") + 1]
    else:
        key = command[_KEY_AT.get(command[0], 1)]
    return key.decode() if isinstance(key, bytes) else str(key)
