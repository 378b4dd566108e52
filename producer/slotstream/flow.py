"""Many sessions at once: frames pushed as the windows allow, replies read as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import redis

from slotstream.app import Fields
from slotstream.endpoint import passes
from slotstream.errors import ReplyTimeout
from slotstream.ids import EntryId
from slotstream.reading import read_replies
from slotstream.replies import Reply
from slotstream.session import Session

_BLOCK_S = 0.05
_PUSHES_A_TURN = 1024

Push = tuple[Session, EntryId, Fields]


class _Source:
    """One session's frames still to come, and the replies so far."""

    def __init__(self, session: Session, frames: Iterable[Any], starts_at: float) -> None:
        self.session = session
        self.frames: Iterator[Any] = iter(frames)
        self.ahead = next(self.frames, None)  # looked at early, so that the last is known as last
        self.started = self.ahead is not None
        self.done = False  # its `end` has been pushed
        self.due_at = starts_at
        self.replies: list[Reply] = []

    def next(self) -> Fields:
        """Fields of the next entry; the last one carries `end`."""
        if self.ahead is None:  # a stream without frames
            self.done = True
            return {"end": "1"}
        frame, self.ahead = self.ahead, next(self.frames, None)
        fields: Fields = {"frame": self.session.app.encode(frame)}
        if self.ahead is None:
            self.done = True
            fields["end"] = "1"
        return fields


def run(
    sessions: Sequence[Session],
    streams: Mapping[str, Iterable[Any]],
    *,
    timeout_s: float,
    rate_hz: float | None,
    on_reply: Callable[[str, Reply], None] | None,
) -> dict[str, list[Reply]]:
    """See `Client.run`."""
    now = time.monotonic()
    period = 1.0 / rate_hz if rate_hz else 0.0
    # Streams of a rate start spread over one period, as sensors that know nothing of each other.
    sources = {
        s.id: _Source(s, streams[s.id], now + period * k / len(sessions))
        for k, s in enumerate(sessions)
    }
    going = dict(sources)
    heard = time.monotonic()
    while going:
        _push(list(going.values()), period)
        waiting = {
            name: source.session
            for name, source in going.items()
            if source.session.in_flight or source.done
        }
        found = read_replies(sessions[0].app.link, waiting, _BLOCK_S) if waiting else {}
        if not waiting:
            time.sleep(min(_BLOCK_S, period or _BLOCK_S))
        for name, replies in found.items():
            for reply in replies:
                sources[name].replies.append(reply)
                if on_reply:
                    on_reply(name, reply)
            if sources[name].session.closed:
                del going[name]
        if found or not waiting:
            heard = time.monotonic()
        elif time.monotonic() - heard > timeout_s:
            left = sorted(going)
            raise ReplyTimeout(
                f"no reply in {timeout_s:g} s; {len(left)} sessions have not ended "
                f"({', '.join(left[:3])}, ...); is a worker running for this app?"
            )
    return {name: source.replies for name, source in sources.items()}


def _push(sources: list[_Source], period: float) -> None:
    """Push one frame of every session that has one due and room in its window."""
    now = time.monotonic()
    batch: list[Push] = []
    for source in sources:
        session = source.session
        if source.done or session.in_flight >= session.window or source.due_at > now:
            continue
        source.due_at += period
        entry = session.next_id()
        fields = source.next()
        session.pushed(entry, ending=source.done)
        batch.append((session, entry, fields))
        if len(batch) == _PUSHES_A_TURN:
            break
    if batch:
        _send(batch)


def _send(batch: list[Push]) -> None:
    """Append a batch in one go; what is refused, or may be there already, one by one."""
    link = batch[0][0].app.link
    commands = [
        ("XADD", session.inbox, str(entry), *chain.from_iterable(fields.items()))
        for session, entry, fields in batch
    ]
    try:
        answers = link.try_calls(commands)
    except (redis.RedisError, OSError) as error:
        if not passes(error):
            raise
        for session, entry, fields in batch:
            session.send(entry, fields, repeated=True)
        return
    for (session, entry, fields), answer in zip(batch, answers, strict=True):
        if isinstance(answer, Exception):
            if "equal or smaller" not in str(answer):
                raise answer
            session.send(entry, fields)
