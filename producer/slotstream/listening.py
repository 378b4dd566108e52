"""Hearing replies of thousands of sessions as they come, while frames go out on other connections.

A read that waits (`XREAD BLOCK`) is under way for the sessions that have something to come, on
connections of their own, and its answer is taken when it is there. Redis looks at every stream a
read names, about a microsecond each, so reads are spaced: they take a part of its time at most.
"""

from __future__ import annotations

import select
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import redis

from slotstream.endpoint import SOCKET_TIMEOUT_S, hash_slot, passes
from slotstream.exchange import Exchange
from slotstream.link import Link
from slotstream.reading import STREAMS_A_READ, pack_read, take, trim
from slotstream.replies import Reply
from slotstream.session import Session

_BLOCK_S = 0.005
"""A session that is pushed into while a read is under way waits so long for the next at most."""

_SPACED = 3e-6
"""Seconds between two reads for each stream that is read: three times what Redis takes for it."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0

Heard = list[tuple[Session, list[Reply], float]]
"""Sessions, their new replies, and when those were received."""


class Listener:
    """Reads the replies of many sessions; a context manager, which closes its connections.

    Args:
        link: to their servers.
        sessions: all that will be listened to.
    """

    def __init__(self, link: Link, sessions: Iterable[Session]) -> None:
        by_slot: dict[int, list[Session]] = defaultdict(list)
        for session in sessions:
            by_slot[hash_slot(session.outbox) if link.endpoint.cluster else 0].append(session)
        self._ears = [
            _Ear(link, own[start : start + STREAMS_A_READ])
            for own in by_slot.values()
            for start in range(0, len(own), STREAMS_A_READ)
        ]
        self._ear_of = {session: ear for ear in self._ears for session in ear.sessions}

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *error: object) -> None:
        for ear in self._ears:
            ear.close()

    def expect(self, session: Session) -> None:
        """Listen to a session, until it has ended or has nothing in flight."""
        self._ear_of[session].expected[session] = None

    def wait(self, timeout_s: float) -> Heard:
        """Replies that are there, waiting up to `timeout_s` for the first.

        Raises:
            redis.RedisError: an outage longer than the link's patience, or what Redis refused.
        """
        until = time.perf_counter() + timeout_s
        while True:
            now = time.perf_counter()
            for ear in self._ears:
                ear.ask(now)
            wake = min([until, *(ear.may_ask_at for ear in self._ears if ear.wants_to_ask)])
            ready = _readable([e for e in self._ears if e.listening], max(wake - now, 0.0))
            heard = [pair for ear in ready for pair in ear.hear()]
            if heard or time.perf_counter() >= until:
                return heard


class _Ear:
    """One connection, and the sessions whose replies come on it."""

    def __init__(self, link: Link, sessions: list[Session]) -> None:
        self.sessions = sessions
        self.expected: dict[Session, None] = {}
        """Those that have something to come, in the order they were pushed into."""
        self.may_ask_at = 0.0
        self._link = link
        self._by_key = {session.outbox.encode(): session for session in sessions}
        self._line: Exchange | None = None
        self._asked_at: float | None = None
        self._down_since: float | None = None
        self._wait_s = _FIRST_WAIT_S

    @property
    def listening(self) -> bool:
        """Whether a read is under way."""
        return self._asked_at is not None

    @property
    def wants_to_ask(self) -> bool:
        """Whether there is something to read, and no read under way."""
        return self._asked_at is None and bool(self.expected)

    def fileno(self) -> int:
        """The connection's file descriptor."""
        return -1 if self._line is None else self._line.fileno()

    def ask(self, now: float) -> None:
        """Begin a read, where one is wanted and it is time; mend what is broken."""
        try:
            if self._asked_at is not None and now - self._asked_at > SOCKET_TIMEOUT_S:
                raise redis.TimeoutError(f"no answer to a read in {SOCKET_TIMEOUT_S:g} s")
            if not self.wants_to_ask or now < self.may_ask_at:
                return
            if self._line is None:
                self._line = Exchange(self._link.endpoint.pool(self.sessions[0].outbox))
            self._line.send(pack_read(list(self.expected), _BLOCK_S), 1)
        except (redis.RedisError, OSError) as error:
            self._broken(error, now)
        else:
            self._asked_at = now
            self.may_ask_at = now + _SPACED * len(self.expected)

    def hear(self) -> Heard:
        """Take the answer of the read under way."""
        answers: list[Any] = []
        try:
            if self._line is not None:
                self._line.receive(answers)
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
        except (redis.RedisError, OSError) as error:
            self._broken(error, time.perf_counter())
            return []
        self._asked_at = self._down_since = None
        self._wait_s = _FIRST_WAIT_S
        heard: Heard = []
        now = time.perf_counter()
        for key, entries in answers[0] or ():
            session = self._by_key[key]
            heard.append((session, take(session, entries, now), now))
            if session.trims:
                trim(self._link, session)
            if session.closed or (session.worker and not session.in_flight):
                del self.expected[session]
        return heard

    def close(self, *, broken: bool = False) -> None:
        """Close the connection."""
        if self._line is not None:
            self._line.close(broken=broken)
        self._line = self._asked_at = None

    def _broken(self, error: Exception, now: float) -> None:
        """Try anew in a while; raises what does not pass, or has not for too long."""
        self.close(broken=True)
        self._down_since = self._down_since or now
        if not passes(error) or now - self._down_since > self._link.patience_s:
            raise error
        self._link.endpoint.forget()
        self.may_ask_at = now + self._wait_s
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)


def _readable(ears: list[_Ear], timeout_s: float) -> list[_Ear]:
    if not ears:
        time.sleep(timeout_s)
        return []
    # `select`: its siblings round what they wait up to milliseconds.
    return select.select(ears, [], [], timeout_s)[0]
