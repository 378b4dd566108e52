"""A session as its producer holds it: frames in, replies out, in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from slotstream.app import App, Fields
from slotstream.endpoint import MAX_BLOCK_S
from slotstream.errors import ReplyTimeout, SessionClosed
from slotstream.ids import OPENED, ZERO, EntryId
from slotstream.reading import read_replies
from slotstream.replies import Reply, parse_reply


class Session:
    """One session. Made by `Client.open` or `Client.attach`; for one thread at a time.

    Frames get rising ids of this client's own, so a push whose answer was lost is repeated
    without running twice.
    """

    def __init__(
        self,
        app: App,
        session: str,
        window: int,
        *,
        last: EntryId = ZERO,
        read_to: EntryId = ZERO,
        trims: bool = False,
        follows: bool = False,
    ) -> None:
        self.app, self.id, self.window = app, session, window
        keys = app.keys(session)
        self.inbox, self.outbox = keys.inbox(session), keys.outbox(session)
        self.trims = trims
        """Whether replies are deleted once read (the session was opened to wait for its reader)."""
        self.closed: Reply | None = None
        """The session's last reply, once it has been read."""
        self.worker: str | None = None
        """The worker that first took the session, once it has."""
        self._last, self._read_to = last, read_to
        self._ending = follows  # others push here too: only the session's end ends its replies
        self._waiting: deque[tuple[EntryId, float]] = deque()
        self._buffer: deque[Reply] = deque()

    def __repr__(self) -> str:
        return f"<Session {self.id} of {self.app.name}: {len(self._waiting)} in flight>"

    @property
    def in_flight(self) -> int:
        """Entries pushed and not answered yet."""
        return len(self._waiting)

    def push(self, array: Any, *, end: bool = False, timeout_s: float = 60.0) -> EntryId:
        """Append a frame; returns its id, which is also its reply's.

        Where the window is full, replies are read (and kept for `replies`) until it is not.

        Args:
            array: `[frame, *sample_shape]`.
            end: close the session after this frame.
            timeout_s: how long to wait for room in the window.

        Raises:
            BadFrame: where the app's configuration is known and the frame does not fit it.
            SessionClosed: the session has ended.
            ReplyTimeout: the window stayed full.
        """
        fields: Fields = {"frame": self.app.encode(array)}
        if end:
            fields["end"] = "1"
        return self._append(fields, timeout_s)

    def reset(self, array: Any = None, *, timeout_s: float = 60.0) -> EntryId:
        """Back to rest, before `array` where one is given, else as an entry of its own."""
        fields: Fields = {"op": "reset"}
        if array is not None:
            fields["frame"] = self.app.encode(array)
        return self._append(fields, timeout_s)

    def end(self) -> EntryId:
        """Close the session once everything pushed has been run."""
        return self._append({"end": "1"}, 60.0)

    def close(self) -> None:
        """Close the session now; frames that wait are cancelled, and counted in the last reply."""
        self.app.close(self.id)
        self._ending = True

    def cancel(self, entry: EntryId) -> bool:
        """Cancel a frame that has not been answered; whether it was still there to cancel."""
        cancelled = self.app.cancel(self.id, entry)
        if cancelled:
            self._waiting = deque(item for item in self._waiting if item[0] != entry)
        return cancelled

    def replies(self, timeout_s: float = 60.0) -> Iterator[Reply]:
        """Replies in order, one a pushed entry, until the session's last one.

        Stops when nothing is in flight and nothing was said to end the session, so a producer
        may push, read its replies, and go on. (One that attached to the session goes on to its
        end, since others may push.)

        Args:
            timeout_s: the longest wait for one reply.

        Raises:
            ReplyTimeout: it passed.
        """
        while True:
            if not self._buffer:
                if self.closed or not (self._waiting or self._ending):
                    return
                self._pump(timeout_s)
            while self._buffer:
                yield self._buffer.popleft()

    def _append(self, fields: Fields, timeout_s: float) -> EntryId:
        while len(self._waiting) >= self.window and not self.closed:
            self._pump(timeout_s)
        if self.closed:
            raise SessionClosed(
                f"session {self.id} has ended ({self.closed.reason}); open a new one"
            )
        entry = self.next_id()
        self.pushed(entry, ending="end" in fields)
        return self.send(entry, fields)

    def send(self, entry: EntryId, fields: Fields, *, repeated: bool = False) -> EntryId:
        """Append an entry that was noted as pushed; returns its id, a later one where need be.

        Where somebody else has written here, the entry comes after theirs.
        """
        tries = 1 if repeated else 0

        def add() -> bool:
            nonlocal tries
            tries += 1
            return self.app.append(self.id, entry, fields, repeated=tries > 1)

        while not self.app.link.patiently(add):
            self._last = max(self._last, self.app.last_entry(self.id))
            was, entry, tries = entry, self.next_id(), 0
            self._last = entry
            self._waiting = deque((entry if e == was else e, at) for e, at in self._waiting)
        return entry

    def next_id(self) -> EntryId:
        """An id after every one so far, by this machine's clock where that is later."""
        now = EntryId(int(time.time() * 1000))
        return now if now > self._last else self._last.next()

    def pushed(self, entry: EntryId, *, ending: bool = False) -> None:
        """Note that an entry is on its way."""
        self._last = entry
        self._waiting.append((entry, time.perf_counter()))
        self._ending = self._ending or ending

    def _pump(self, timeout_s: float) -> None:
        """Read replies into the buffer; waits for the first one."""
        deadline = time.monotonic() + timeout_s
        while True:
            block = min(deadline - time.monotonic(), MAX_BLOCK_S)
            if block <= 0:
                raise ReplyTimeout(
                    f"no reply in {timeout_s:g} s in session {self.id}, {self.in_flight} in "
                    "flight; is a worker running for this app, and has it room?"
                )
            found = read_replies(self.app.link, {self.id: self}, block).get(self.id)
            if found:
                self._buffer.extend(found)
                return

    def take(self, raw_id: bytes, raw: list[bytes]) -> Reply | None:
        """Take in one entry of `out`; None for one that is not for the reader (`opened`)."""
        id_ = EntryId.parse(raw_id)
        self._read_to = id_
        latency = None
        while self._waiting and self._waiting[0][0] <= id_:
            entry, at = self._waiting.popleft()
            if entry == id_:
                latency = time.perf_counter() - at
        reply = parse_reply(raw_id, raw, latency)
        if id_ == OPENED and not reply.end:  # one that was closed before it was claimed ends there
            self.worker = reply.worker
            return None
        if reply.end:
            self.closed = reply
            self._waiting.clear()
        return reply

    @property
    def read_to(self) -> EntryId:
        """Id of the last reply read."""
        return self._read_to
