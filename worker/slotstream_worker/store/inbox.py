"""Finding the frames: Redis says which streams have changed, and those are read.

`CLIENT TRACKING` tells a connection once that a key it has read has changed, also one that did
not exist yet, and again only after the next read. So a read both fetches and re-arms, and an
idle worker sleeps on the socket where the news comes in. It is a hint for speed: a slow sweep
over all streams is the truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import redis
from redis.exceptions import ResponseError

from slotstream.ids import EntryId
from slotstream.lines import Line
from slotstream.names import Keys

Raw = tuple[EntryId, list[bytes]]
"""An entry: its id, and its fields and values in turn."""

STREAMS_A_READ = 512
CONTROL_A_READ = "64"
WAITING_A_READ = "127"


class Queues(NamedTuple):
    """Control entries (id, session), sessions that wait, and what an operator asks."""

    control: list[tuple[bytes, str]]
    waiting: list[str]
    order: str


_CHANNEL = "__redis__:invalidate"


class Inbox:
    """The `in` streams of one partition, and its control stream and queue.

    Two connections: one reads (and is thereby tracked), one hears what has changed.
    """

    def __init__(self, pool: redis.ConnectionPool, keys: Keys, worker: str) -> None:
        self.keys = keys
        self._news = Line(pool)
        listener = self._news.call("CLIENT", "ID")
        self._news.call("SUBSCRIBE", _CHANNEL)
        self._reader = Line(pool)
        self._reader.call("CLIENT", "TRACKING", "ON", "REDIRECT", listener)
        self._in = (keys.prefix + "in:").encode()
        self._pinged = False
        self._order_key = keys.order(worker)
        self.news = True
        """Whether control, the queue or the order to this worker may have changed."""
        self.changed: set[str] = set()
        """Sessions whose stream may hold entries that have not been read."""

    def listen(self, timeout_s: float) -> None:
        """Take in what Redis says has changed; waits up to `timeout_s` for the first news."""
        while self._news.readable(timeout_s):
            timeout_s = 0.0
            message = self._news.receive()
            if message[0] == b"pong":
                self._pinged = False
            elif message[0] == b"message":
                # No list of keys: everything has changed (FLUSHALL, or the table overflowed).
                if message[2] is None:
                    raise redis.ConnectionError("Redis was flushed; everything is read anew")
                if isinstance(message[2], list):  # anything else is somebody's PUBLISH
                    for key in message[2]:
                        self._note(key)

    def _note(self, key: bytes) -> None:
        if key.startswith(self._in):
            self.changed.add(key[len(self._in) :].decode("latin-1"))
        else:
            self.news = True

    def queues(self) -> Queues:
        """The start of `control` and of the queue, and the order; all watched again."""
        self.news = False
        control, waiting, order = self._calls(
            [
                ("XRANGE", self.keys.control, "-", "+", "COUNT", CONTROL_A_READ),
                ("ZRANGE", self.keys.waiting, "0", WAITING_A_READ),
                ("GET", self._order_key),
            ],
            missing=(),  # a key that is no stream or set holds nothing for anybody
        )
        entries = [(id_, _session(fields)) for id_, fields in control]
        return Queues(entries, [raw.decode() for raw in waiting], (order or b"").decode())

    def read(self, positions: Mapping[str, EntryId], count: int) -> dict[str, list[Raw]]:
        """Up to `count` entries behind each session's position; the streams are watched again.

        A stream that gave as many as it was asked for stays in `changed`: there may be more.
        A key that is no stream gives nothing.
        """
        found: dict[str, list[Raw]] = {}
        sessions = list(positions)
        for start in range(0, len(sessions), STREAMS_A_READ):
            part = sessions[start : start + STREAMS_A_READ]
            try:
                found.update(self._xread(part, positions, count))
            except ResponseError as error:
                if not str(error).startswith("WRONGTYPE"):
                    raise
                # One key that is no stream would hide all the others.
                for session in part:
                    try:
                        found.update(self._xread([session], positions, count))
                    except ResponseError as error:
                        if not str(error).startswith("WRONGTYPE"):
                            raise
                        continue
        self.changed.difference_update(s for s in sessions if len(found.get(s, ())) < count)
        return found

    def _xread(
        self, sessions: list[str], positions: Mapping[str, EntryId], count: int
    ) -> dict[str, list[Raw]]:
        answer = self._reader.call(
            "XREAD",
            "COUNT",
            count,
            "STREAMS",
            *[self.keys.inbox(s) for s in sessions],
            *[str(positions[s]) for s in sessions],
        )
        return {
            key[len(self._in) :].decode(): [(EntryId.parse(i), fields) for i, fields in entries]
            for key, entries in answer or ()
        }

    def between(self, ranges: Mapping[str, tuple[EntryId, EntryId]]) -> dict[str, list[Raw]]:
        """All entries of each session after the first id, up to and including the second."""
        answers = self._calls(
            [
                ("XRANGE", self.keys.inbox(s), f"({low}", str(high))
                for s, (low, high) in ranges.items()
            ],
            missing=[],
        )
        return {
            session: [(EntryId.parse(i), fields) for i, fields in answer]
            for session, answer in zip(ranges, answers, strict=True)
        }

    def check(self) -> None:
        """Ask the silent connection for a sign; raises where the last one never came."""
        if self._pinged:
            raise redis.ConnectionError("the connection that hears of changes has gone silent")
        self._pinged = True
        self._news.send("PING")

    def fileno(self) -> int:
        """File descriptor of the connection that hears, for waiting on several."""
        return self._news.fileno()

    def close(self) -> None:
        """Close both connections."""
        self._news.close()
        self._reader.close()

    def _calls(self, commands: list[tuple[str, ...]], missing: Any = None) -> list[Any]:
        """Answers in order; `missing` for a key of another type, where it is given."""
        answers = self._reader.calls(commands)
        for k, answer in enumerate(answers):
            if isinstance(answer, Exception):
                if missing is None or not str(answer).startswith("WRONGTYPE"):
                    raise answer
                answers[k] = missing
        return answers


def _session(fields: list[bytes]) -> str:
    """The session that a control entry names; a name that none can have where it is unreadable."""
    names = dict(zip(fields[::2], fields[1::2], strict=False))
    return names.get(b"session", b"").decode("latin-1")
