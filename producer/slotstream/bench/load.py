"""The load itself: frames pushed when they are due, replies heard as they come.

With a rate, the frames of all sessions are due one after another, evenly spread, whatever the
deployment does: a frame that finds its session's window full is pushed later, and its latency
counts from when it was due. (Counted from the push, a deployment that stands still for a second
would look fast: the frames that should have been pushed in that second would be missing.)
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat

import numpy as np
import redis

from slotstream.bench.ledger import Account, Ledger
from slotstream.bench.plan import Plan
from slotstream.bench.samples import Samples
from slotstream.bursts import Burst
from slotstream.client import Client
from slotstream.errors import Unavailable
from slotstream.flow import some
from slotstream.listening import Listener
from slotstream.sending import send
from slotstream.session import Session

_TURN_S = 0.05
"""The longest a turn waits, so that whoever watches sees it go."""

_LEAVE_S = 3.0
"""The longest an outage is waited out at the end, when only tidying up is left."""

_ENTRIES_A_TURN = 512
"""What is sent before replies are listened for again: a millisecond or two of work."""

_FLUSH_S = 0.2
"""How old the latencies are at most that a display shows."""

_TRIM_EVERY = 256
"""Replies of a session after which they are deleted: a load must not fill the server's memory."""


class _Stream:
    """One session under load."""

    __slots__ = ("account", "at", "due", "place", "pushed", "queued", "session", "untrimmed")

    def __init__(self, session: Session, ledger: Ledger, place: int, at: int) -> None:
        self.session, self.account = session, Account(ledger)
        self.place, self.at = place, at  # among the sessions, and in the samples
        self.due = self.pushed = self.untrimmed = 0
        self.queued = False  # whether it stands among those that have something to push


class Load:
    """One run of a plan against an app; `ledger` has what came of it, also while it runs.

    Args:
        client: of the app, with the plan's window.
        plan: what is asked for.
        samples: what is pushed.
        presses: how often somebody has asked to stop: once ends the pushing, twice the waiting.
        look: called every so often, for whoever watches.
    """

    def __init__(
        self,
        client: Client,
        plan: Plan,
        samples: Samples,
        *,
        presses: Callable[[], int] = lambda: 0,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._client, self.plan, self._samples = client, plan, samples
        self._presses, self._look = presses, look
        self.ledger = Ledger()
        self.state = "opening"
        """`opening`, `pushing`, `waiting` for the last replies, `done`."""
        self.opened = 0
        """Sessions that a worker has taken."""
        self.started_at = self.stopped_at = 0.0
        """When the first frame was due; when pushing ended."""
        self.answered_in_time = 0
        """Replies that came before pushing ended."""
        self.behind = 0
        """Frames that were due and never pushed, since their sessions' windows were full."""
        self.cpu_s = 0.0
        """Processor time of this process while frames were pushed."""
        self._streams: list[_Stream] = []
        self._by_session: dict[Session, _Stream] = {}
        self._ready: deque[_Stream] = deque()
        self._flushed_at = 0.0
        self._ticked = 0  # frames of all sessions that have been due

    @property
    def interrupted(self) -> bool:
        """Whether somebody has asked to stop."""
        return self._presses() > 0

    def run(self) -> None:
        """Open the sessions, push, end them, wait for what is missing; leave nothing open.

        Raises:
            Unavailable: the workers have not taken all sessions in `wait_s`.
            redis.RedisError: an outage longer than the client's patience.
        """
        names = [f"bench-{secrets.token_hex(4)}-{k}" for k in range(self.plan.sessions)]
        try:
            sessions = self._client.open_many(names, new=True)
            starts = np.random.default_rng(self.plan.seed).integers(
                len(self._samples), size=len(sessions)
            )
            for k, session in enumerate(sessions):
                stream = _Stream(session, self.ledger, k, int(starts[k]))
                self._streams.append(stream)
                self._by_session[session] = stream
            with Listener(self._client.link, sessions) as listener:
                self._open(listener)
                if not self.interrupted:
                    self._push(listener)
                self._drain(listener)
        finally:
            self.state = "done"
            for stream in self._streams:
                stream.account.close()
            self.ledger.flush()
            self._leave(names)

    def _open(self, listener: Listener) -> None:
        """Wait until every session has its worker."""
        for stream in self._streams:
            listener.expect(stream.session)
        quiet_since = time.perf_counter()
        while self.opened < len(self._streams) and not self.interrupted:
            listener.wait(_TURN_S)
            opened = sum(stream.session.worker is not None for stream in self._streams)
            if opened > self.opened:
                self.opened, quiet_since = opened, time.perf_counter()
            self._watched()
            if time.perf_counter() - quiet_since > self.plan.wait_s:
                raise Unavailable(
                    f"{len(self._streams) - self.opened} of {len(self._streams)} sessions found no "
                    f"worker with room in {self.plan.wait_s:g} s; `slotstream workers` shows how "
                    "many each holds (--max-sessions), or take fewer --sessions"
                )

    def _push(self, listener: Listener) -> None:
        """Push what falls due, until nothing more does."""
        plan, ledger = self.plan, self.ledger
        self.state = "pushing"
        self.started_at, cpu = time.perf_counter(), time.process_time()
        now = self.started_at
        until = self.started_at + plan.duration_s
        if not plan.rate_hz:
            self._ready.extend(self._streams)
        try:
            while now < until and not self.interrupted:
                self._tick(now)
                self._send(listener)
                self._hear(listener, self._pause_s(until))
                self._watched()
                now = time.perf_counter()
        finally:
            self.stopped_at, self.answered_in_time = time.perf_counter(), ledger.replies
            self.cpu_s = time.process_time() - cpu
        self._tick(min(now, until))
        while plan.rate_hz and self._ready:  # due, with room, and only not sent yet
            self._send(listener)
        self.behind = sum(
            stream.due - stream.pushed
            for stream in self._streams
            if plan.rate_hz and stream.session.closed is None
        )

    def _tick(self, now: float) -> None:
        """Note the frames that have fallen due since the last time."""
        plan, streams = self.plan, self._streams
        if not plan.rate_hz:
            return
        due = min(int((now - self.started_at) * plan.asked_hz) + 1, plan.due)
        for tick in range(self._ticked, due):
            stream = streams[tick % len(streams)]
            stream.due += 1
            self._queue(stream)
        self._ticked = max(self._ticked, due)

    def _queue(self, stream: _Stream) -> None:
        """Let a session push, where it has something to push and room for it."""
        waits = not self.plan.rate_hz or stream.due > stream.pushed
        session = stream.session
        if waits and not stream.queued and session.room > 0 and session.closed is None:
            stream.queued = True
            self._ready.append(stream)

    def _send(self, listener: Listener) -> None:
        """Push a turn's worth of what is due."""
        bursts: list[Burst] = []
        while self._ready and not bursts:
            bursts = some(self._ready, self._burst, most=_ENTRIES_A_TURN)
            self._ready = deque(stream for stream in self._ready if stream.queued)
        if not bursts:
            return
        now = time.perf_counter()
        send(self._client.link, bursts)
        for burst in bursts:
            stream = self._by_session[burst.session]
            stream.account.push(burst.ids, self._due(stream, len(burst.ids), now), now)
            stream.pushed += len(burst.ids)
            listener.expect(stream.session)

    def _burst(self, stream: _Stream) -> Burst | None:
        """The frames of a session that are due and have room."""
        stream.queued = False
        count = stream.session.room
        if self.plan.rate_hz:
            count = min(count, stream.due - stream.pushed)
        if count < 1 or stream.session.closed is not None:
            return None
        return stream.session.burst(self._samples.take(stream.at + stream.pushed, count))

    def _due(self, stream: _Stream, count: int, now: float) -> Iterator[float]:
        """When the next frames of a session were due; without a rate, when there is room."""
        if not self.plan.rate_hz:
            return repeat(now, count)
        step, period = len(self._streams), 1 / self.plan.asked_hz
        first = stream.pushed * step + stream.place
        return (self.started_at + (first + k * step) * period for k in range(count))

    def _pause_s(self, until: float) -> float:
        """How long replies may be waited for."""
        if self._ready:
            return 0.0
        now = time.perf_counter()
        pause = min(_TURN_S, until - now)
        if self.plan.rate_hz:
            pause = min(pause, self.started_at + self._ticked / self.plan.asked_hz - now)
        return max(pause, 0.0)

    def _hear(self, listener: Listener, wait_s: float) -> bool:
        """Take in the replies that are there; whether there were any."""
        heard = listener.wait(wait_s)
        worn = []
        for session, replies, at in heard:
            stream = self._by_session[session]
            account = stream.account
            self.ledger.heard(at)
            for reply in replies:
                error = reply.error
                account.reply(reply.raw_id, at, None if error is None else error.code)
            if session.closed:
                account.end(session.closed.reason or "")
            stream.untrimmed += len(replies)
            if stream.untrimmed >= _TRIM_EVERY:
                stream.untrimmed = 0
                worn.append(session)
            self._queue(stream)
        if worn:
            # The last one stays: `out` is never empty, which a new worker would take for new.
            self._client.link.calls(
                [("XTRIM", s.outbox, "MINID", "=", s.position.decode()) for s in worn]
            )
        return bool(heard)

    def _drain(self, listener: Listener) -> None:
        """End the sessions, and wait until all that is missing has come or nothing comes."""
        self.state = "waiting"
        open_ = deque(stream for stream in self._streams if stream.session.closed is None)

        def end(stream: _Stream) -> Burst:
            burst = stream.session.burst(end=True)
            stream.account.ask_end(burst.ids[0])
            return burst

        while open_:
            bursts = some(open_, end)
            send(self._client.link, bursts)
            for burst in bursts:
                listener.expect(burst.session)
                open_.pop()  # they stand at the end now
        heard_at = time.perf_counter()
        while not all(stream.account.ended for stream in self._streams):
            if self._hear(listener, _TURN_S):
                heard_at = time.perf_counter()
            self._watched()
            if self._presses() > 1 or time.perf_counter() - heard_at > self.plan.wait_s:
                return

    def _watched(self) -> None:
        """Let whoever watches look, at latencies that are counted up to now."""
        now = time.perf_counter()
        if now - self._flushed_at > _FLUSH_S:
            self._flushed_at = now
            self.ledger.flush()
        self._look()

    def _leave(self, names: list[str]) -> None:
        """Close what has not ended, and delete the replies of what has: they would stay an hour."""
        ended = [stream.session for stream in self._streams if stream.session.closed]
        gone = {session.id for session in ended}
        app = self._client.app
        self._client.link.patience_s = min(self._client.link.patience_s, _LEAVE_S)
        with contextlib.suppress(redis.RedisError, OSError):  # what matters is said already
            self._client.link.calls([("DEL", session.outbox) for session in ended])
            self._client.link.calls(
                [
                    ("XADD", app.keys(name).control, "*", "op", "close", "session", name)
                    for name in names
                    if name not in gone
                ]
            )
