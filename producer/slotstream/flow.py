"""Many sessions at once: frames pushed as the windows allow, replies read as they come."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from slotstream.bursts import Buffer, Burst, Frames
from slotstream.endpoint import MAX_BLOCK_S
from slotstream.errors import BadFrame, ReplyTimeout, SessionClosed
from slotstream.ids import EntryId
from slotstream.reading import read_replies
from slotstream.replies import Reply
from slotstream.sending import send

if TYPE_CHECKING:
    from slotstream.session import Session

T = TypeVar("T")

_BLOCK_S = 0.05
_ENTRIES_A_TURN, _BYTES_A_TURN = 4096, 4 * 2**20
"""What is sent before replies are read again."""


class _Source:
    """One session's frames still to come, and the replies so far."""

    def __init__(self, session: Session, frames: Iterable[Any], starts_at: float) -> None:
        self.session = session
        self.frames: Iterator[Any] = iter(frames)
        self.ahead = next(self.frames, None)  # looked at early, so that the last is known as last
        self.done = False  # its `end` has been pushed
        self.due_at = starts_at
        self.replies: list[Reply] = []

    def burst(self, now: float, period: float) -> Burst | None:
        """The frames that are due and have room; None where there are none."""
        room = 0 if self.done or self.due_at > now else self.session.room
        if room < 1:
            return None
        if period:
            room = min(room, int((now - self.due_at) / period) + 1)
            self.due_at += room * period
        before, data = self.session.app.encoder()
        datas: list[Buffer] = []
        # Each is copied before the next is drawn, which may be written into the same array.
        while self.ahead is not None and len(datas) < room:
            datas.append(data(self.ahead))
            self.ahead = next(self.frames, None)
        self.done = self.ahead is None
        return self.session.burst(Frames(before, datas), end=self.done)


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
    going, turns = dict(sources), deque(sources.values())
    heard = time.monotonic()
    while going:
        _push(turns, period)
        waiting = {
            name: source.session
            for name, source in going.items()
            if source.session.in_flight or source.done
        }
        wait_s = _wait_s(turns, period)
        found = read_replies(sessions[0].app.link, waiting, wait_s) if waiting else {}
        if not waiting:
            time.sleep(wait_s)
        for name, replies in found.items():
            sources[name].replies += replies
            if on_reply:
                for reply in replies:
                    on_reply(name, reply)
            if sources[name].session.closed:
                turns.remove(going.pop(name))
        if found or not waiting:
            heard = time.monotonic()
        elif time.monotonic() - heard > timeout_s:
            left = sorted(going)
            raise ReplyTimeout(
                f"no reply in {timeout_s:g} s; {len(left)} sessions have not ended "
                f"({', '.join(left[:3])}, ...); is a worker running for this app?"
            )
    return {name: source.replies for name, source in sources.items()}


def _push(turns: deque[_Source], period: float) -> None:
    """Push what the sessions have due and room for, within the bounds of a turn."""
    now = time.monotonic()
    bursts = some(turns, lambda source: source.burst(now, period))
    if bursts:
        send(turns[0].session.app.link, bursts)


def some(
    turns: deque[T], make: Callable[[T], Burst | None], *, most: int = _ENTRIES_A_TURN
) -> list[Burst]:
    """A burst of each that has one, in turn, up to about `most` entries.

    The next call begins with the one at which this one stopped.
    """
    bursts: list[Burst] = []
    entries = size = 0
    for _ in range(len(turns)):
        burst = make(turns[0])
        turns.rotate(-1)
        if burst is not None:
            bursts.append(burst)
            entries, size = entries + len(burst.ids), size + burst.nbytes
            if entries >= most or size >= _BYTES_A_TURN:
                break
    return bursts


def _wait_s(turns: deque[_Source], period: float) -> float:
    """How long replies may be waited for, before the next frame is due."""
    if not period:
        return _BLOCK_S
    now = time.monotonic()
    due = [s.due_at - now for s in turns if not s.done and s.session.in_flight < s.session.window]
    return max(min([_BLOCK_S, *due]), 0.0)


class _Outgoing:
    """One session's frames of a `push_many`, until all are pushed."""

    def __init__(self, session: Session, frames: Frames, *, end: bool) -> None:
        self.session, self.frames, self.end = session, frames, end
        self.bursts: list[Burst] = []
        self.pushed = 0

    @property
    def left(self) -> int:
        """Entries not pushed yet; an `end` is one of its own only where there is no frame."""
        entries = max(len(self.frames.datas), 1 if self.end else 0)
        return entries - self.pushed

    def burst(self) -> Burst | None:
        """The next frames, as many as there is room for."""
        room = 0 if self.session.closed else min(self.session.room, self.left)
        if room < 1:
            return None
        datas = self.frames.datas[self.pushed : self.pushed + room]
        self.pushed += room
        frames = Frames(self.frames.before, datas)
        self.bursts.append(self.session.burst(frames, end=self.end and not self.left))
        return self.bursts[-1]


def push_many(
    streams: Mapping[Session, Iterable[Any]], *, end: bool, timeout_s: float
) -> dict[Session, list[EntryId]]:
    """See `Client.push_many`."""
    outgoing = []
    for session, frames in streams.items():
        if session.closed:
            raise session.has_ended()
        try:
            outgoing.append(_Outgoing(session, session.app.frames(frames), end=end))
        except BadFrame as error:
            reason = f"session {session.id}: {error}; nothing of this call was sent"
            raise BadFrame(error.code, reason) from None
    going = deque(one for one in outgoing if one.left)
    while going:
        bursts = some(going, lambda one: one.burst())
        if bursts:
            send(going[0].session.app.link, bursts)
        going = deque(one for one in going if one.left and not one.session.closed)
        if going and all(one.session.room < 1 for one in going):
            _make_room([one.session for one in going], timeout_s)
    for one in outgoing:
        if one.left and one.session.closed:
            raise SessionClosed(
                f"session {one.session.id} has ended ({one.session.closed.reason}), and {one.left} "
                "of its entries were not pushed; those of the other sessions were"
            )
    return {
        one.session: [entry for burst in one.bursts for entry in burst.entry_ids()]
        for one in outgoing
    }


def _make_room(sessions: Sequence[Session], timeout_s: float) -> None:
    """Read replies, and keep them, until one of some sessions whose windows are full has room."""
    by_name = {session.id: session for session in sessions}
    deadline = time.monotonic() + timeout_s
    while all(session.room < 1 and not session.closed for session in sessions):
        wait_s = min(deadline - time.monotonic(), MAX_BLOCK_S)
        if wait_s <= 0:
            raise ReplyTimeout(
                f"no reply in {timeout_s:g} s, and the windows of {len(sessions)} sessions are "
                f"full ({', '.join(list(by_name)[:3])}, ...): not all frames were pushed; is a "
                "worker running for this app, and has it room?"
            )
        for name, replies in read_replies(sessions[0].app.link, by_name, wait_s).items():
            by_name[name].keep(replies)
