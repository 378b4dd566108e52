"""A session as its producer holds it: frames in, replies out, in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

from slotstream import flow
from slotstream.app import App
from slotstream.arguments import argument
from slotstream.bursts import NONE, Burst, Fields, Frames, xadd_head
from slotstream.endpoint import MAX_BLOCK_S
from slotstream.errors import ReplyTimeout, SessionClosed
from slotstream.ids import ZERO, EntryId
from slotstream.reading import read_replies
from slotstream.replies import Reply


class Session:
    """One session. Made by `Client.open` or `Client.attach`; for one thread at a time.

    Frames get rising ids of this client's own, so a push whose answer was lost is repeated
    without running twice. The ids of one push end with `-0` and no two that attached share a
    millisecond; those that go together begin with `-1` and share one, so that no other client's
    id falls between them.
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
        self.row = keys.row(session)
        self.xadd, self.asked = xadd_head(self.inbox), argument(self.outbox.encode())
        self.trims = trims
        """Whether replies are deleted once read (the session was opened to wait for its reader)."""
        self.closed: Reply | None = None
        """The session's last reply, once it has been read."""
        self.worker: str | None = None
        """The worker that first took the session, once it has."""
        self.position = str(read_to).encode()
        """Id of the last reply read, as Redis writes it."""
        self._last, self._shared = last, follows
        self._ending = follows  # others push here too: only the session's end ends its replies
        # Two plain queues, not one of pairs: the garbage collector need not look into them.
        self._waiting: deque[bytes] = deque()  # ids as Redis writes them
        self._since: deque[float] = deque()  # when each was pushed
        self._buffer: deque[Reply] = deque()

    def __repr__(self) -> str:
        return f"<Session {self.id} of {self.app.name}: {len(self._waiting)} in flight>"

    @property
    def in_flight(self) -> int:
        """Entries pushed and not answered yet."""
        return len(self._waiting)

    @property
    def room(self) -> int:
        """How many entries may go together now.

        One at most in a session that this client attached to: others may push there too, and
        of several sent together theirs could take the place of the first alone.
        """
        room = self.window - len(self._waiting)
        return min(room, 1) if self._shared else room

    def push(self, array: Any, *, end: bool = False, timeout_s: float = 60.0) -> EntryId:
        """Append a frame; returns its id, which is also its reply's.

        Where the window is full, replies are read (and kept for `replies`) until it is not.

        Args:
            array: `[frame, *sample_shape]`; of a model with several inputs, a mapping of their
                names to arrays.
            end: close the session after this frame, which may then have fewer steps.
            timeout_s: how long to wait for room in the window.

        Raises:
            BadFrame: where the app's configuration is known and the frame does not fit it.
            SessionClosed: the session has ended.
            ReplyTimeout: the window stayed full.
        """
        fields: Fields = {"frame": self.app.encode(array, last=end)}
        if end:
            fields["end"] = "1"
        return self._append(fields, timeout_s)

    def push_many(
        self, frames: Iterable[Any], *, end: bool = False, timeout_s: float = 60.0
    ) -> list[EntryId]:
        """Append frames, many in a round trip; returns their ids. See `Client.push_many`."""
        return flow.push_many({self: frames}, end=end, timeout_s=timeout_s)[self]

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
            self._forget(str(entry).encode())
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
        while self.room < 1 and not self.closed:
            self._pump(timeout_s)
        if self.closed:
            raise self.has_ended()
        entry = self.next_id()
        self._last = entry
        self._note([str(entry).encode()], end="end" in fields)
        return self.send(entry, fields)

    def burst(self, frames: Frames = NONE, *, end: bool = False) -> Burst:
        """Frames to be sent together, or without any an `end`; noted as pushed."""
        if self._shared:
            first = self.next_id()
        else:
            first = max(EntryId(int(time.time() * 1000), 1), self._last.next())
        ms, seq = first
        ids = [b"%d-%d" % (ms, n) for n in range(seq, seq + max(len(frames.datas), 1))]
        self._last = EntryId(ms, seq + len(ids) - 1)
        self._note(ids, end=end)
        return Burst(self, first, ids, frames, end)

    def _note(self, ids: list[bytes], *, end: bool) -> None:
        """Note entries as pushed."""
        self._waiting.extend(ids)
        self._since.extend(repeat(time.perf_counter(), len(ids)))
        self._ending = self._ending or end

    def has_ended(self) -> SessionClosed:
        """What a push into a session that has ended raises."""
        reason = self.closed.reason if self.closed else None
        return SessionClosed(f"session {self.id} has ended ({reason}); open a new one")

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
            was, entry, tries = str(entry).encode(), self.next_id(), 0
            self._last, now = entry, str(entry).encode()
            self._waiting = deque(now if e == was else e for e in self._waiting)
        return entry

    def next_id(self) -> EntryId:
        """An id after every one so far, by this machine's clock where that is later."""
        now, last = EntryId(int(time.time() * 1000)), self._last
        if now > last:
            return now
        return EntryId(last.ms + 1) if self._shared else last.next()

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
                self.keep(found)
                return

    def keep(self, replies: Iterable[Reply]) -> None:
        """Keep replies that were read to make room, for `replies`."""
        self._buffer.extend(replies)

    def take(self, raw_id: bytes, raw: list[bytes], now: float) -> Reply | None:
        """Take in one entry of `out`; None for one that is not for the reader (`opened`)."""
        self.position = raw_id
        if not (self._waiting and self._waiting[0] == raw_id):
            self._skip(raw_id)
        latency = None
        if self._waiting and self._waiting[0] == raw_id:
            self._waiting.popleft()
            latency = now - self._since.popleft()
        reply = Reply(raw_id, raw, latency)
        if b"end" in raw[::2] and reply.end:
            self.closed = reply
            self._waiting.clear()
            self._since.clear()
        elif raw_id == b"0-1":  # one that was closed before it was claimed ends there
            self.worker = reply.worker
            return None
        return reply

    def _skip(self, raw_id: bytes) -> None:
        """Forget entries that will have no reply, since a later one has."""
        id_ = EntryId.parse(raw_id)
        while self._waiting and EntryId.parse(self._waiting[0]) < id_:
            self._waiting.popleft()
            self._since.popleft()

    def _forget(self, raw_id: bytes) -> None:
        """Forget an entry that was cancelled."""
        if raw_id in self._waiting:
            del self._since[self._waiting.index(raw_id)]
            self._waiting.remove(raw_id)

    @property
    def read_to(self) -> EntryId:
        """Id of the last reply read."""
        return EntryId.parse(self.position)
