"""The accounts of a load: each frame pushed, each reply to it, and what does not add up.

The client library is not asked: what it took for granted is what is checked here. A session's
replies come in the order of its frames, so a reply that skips a frame says that the skipped one
will have none, and a reply to no frame that waits is one too many.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from slotstream.bench.histogram import Histogram
from slotstream.ids import EntryId


class Ledger:
    """The totals of all sessions. Times are seconds of one clock.

    Attributes:
        pushed: frames pushed.
        replies: replies to them, errors among them.
        lost: frames that have had no reply and will have none.
        duplicated: replies to frames that were answered already, or that nobody pushed.
        errors: error replies by code.
        ended_early: sessions that ended before they were asked to, by reason.
        awaited: frames pushed whose replies are to come.
        longest_gap_s: the longest time without any reply while one was awaited.
        from_due: from when a frame was due to its reply.
        from_push: from when it was pushed to its reply.
    """

    def __init__(self) -> None:
        self.pushed = self.replies = self.lost = self.duplicated = self.awaited = 0
        self.errors: Counter[str] = Counter()
        self.ended_early: Counter[str] = Counter()
        self.longest_gap_s = 0.0
        self.from_due, self.from_push = Histogram(), Histogram()
        self._quiet_since = 0.0

    def waits(self, frames: int, now: float) -> None:
        """Note that so many frames were pushed."""
        if not self.awaited:
            self._quiet_since = now
        self.pushed += frames
        self.awaited += frames

    def heard(self, now: float) -> None:
        """Note that replies have come, before they are taken in."""
        if self.awaited:
            self.longest_gap_s = max(self.longest_gap_s, now - self._quiet_since)
        self._quiet_since = now

    def lose(self, frames: int) -> None:
        """Note that so many frames will have no reply."""
        self.lost += frames
        self.awaited -= frames

    def flush(self) -> None:
        """Count the latencies added so far."""
        self.from_due.flush()
        self.from_push.flush()


class Account:
    """One session's frames that wait for their replies."""

    __slots__ = ("_due", "_ids", "_last", "_ledger", "_pushed", "ended")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # Three plain queues, not one of triples: the garbage collector need not look into them.
        self._ids: deque[bytes] = deque()
        self._due: deque[float] = deque()
        self._pushed: deque[float] = deque()
        self._last: bytes | None = None
        self.ended = False
        """Whether its last reply has come."""

    @property
    def awaited(self) -> int:
        """Frames pushed whose replies are to come."""
        return len(self._ids)

    def push(self, ids: Iterable[bytes], due: Iterable[float], now: float) -> None:
        """Note frames pushed now, with their ids and the times at which they were due."""
        before = len(self._ids)
        self._ids.extend(ids)
        self._due.extend(due)
        self._pushed.extend([now] * (len(self._ids) - before))
        self._ledger.waits(len(self._ids) - before, now)

    def ask_end(self, id_: bytes) -> None:
        """Note the entry that asks for the session's end, and is no frame."""
        self._last = id_

    def reply(self, id_: bytes, now: float, error: str | None = None) -> None:
        """Take in a reply by its id, and its error's code where it is an error."""
        ledger = self._ledger
        if id_ == self._last:
            return
        if not (self._ids and self._ids[0] == id_):
            self._skip(id_)
        if not (self._ids and self._ids[0] == id_):
            ledger.duplicated += 1
            return
        self._ids.popleft()
        ledger.replies += 1
        ledger.awaited -= 1
        ledger.from_due.add(now - self._due.popleft())
        ledger.from_push.add(now - self._pushed.popleft())
        if error is not None:
            ledger.errors[error] += 1

    def end(self, reason: str) -> None:
        """Take in the end of the session, after the reply that has it."""
        self.ended = True
        if self._last is None:
            self._ledger.ended_early[reason] += 1
        self.close()

    def close(self) -> None:
        """Give up what still waits: it is lost."""
        self._drop(len(self._ids))

    def _skip(self, id_: bytes) -> None:
        """Lose the frames before a reply's, which a reply would have come to before."""
        entry, skipped = EntryId.parse(id_), 0
        for raw in self._ids:
            if EntryId.parse(raw) >= entry:
                break
            skipped += 1
        self._drop(skipped)

    def _drop(self, frames: int) -> None:
        for _ in range(frames):
            self._ids.popleft()
            self._due.popleft()
            self._pushed.popleft()
        self._ledger.lose(frames)
