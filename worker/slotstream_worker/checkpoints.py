"""Whose checkpoint is due, and its row read off the device, without anybody waiting for it.

A read of rows comes behind the rounds under way, so it is begun, and taken in when it has come.
Meanwhile the session goes on running; what it answered until the read began is written together
with the row, which is the state after the last of those answers, and the rest comes after.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from dataclasses import dataclass

from slotstream_worker.config import WorkerConfig
from slotstream_worker.engine.rows import RowsReading
from slotstream_worker.host import Host
from slotstream_worker.hosted import Hosted
from slotstream_worker.store.commits import Checkpoint

ROWS_A_READ = 256
"""Sessions whose rows are read, and written, at a time: their answers wait for the read."""

_GATHER_SHARE, _GATHER_S = 0.1, 0.1
"""How much later than due a checkpoint may be, by its interval and at most, so that several go
together: to read one row off the device takes as long as to read a hundred."""


class Allowance:
    """Bytes of state that may go to Redis now: so many a second, a second's worth saved up."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = self._left = bytes_per_s
        self._at = time.monotonic()

    def rows(self, size: int) -> int:
        """How many rows of `size` bytes may go now; at least one a second, whatever its size."""
        now = time.monotonic()
        self._left = min(self._left + self._rate * (now - self._at), max(self._rate, size))
        self._at = now
        return max(int(self._left // size), 0)

    def spend(self, nbytes: int) -> None:
        """Note what has been sent."""
        self._left -= nbytes


@dataclass(frozen=True)
class Saved:
    """A checkpoint that can be written: the state after the first `answers` of its session's."""

    checkpoint: Checkpoint
    answers: int


@dataclass
class _Reading:
    """Rows on their way, and how many answers each session's is the state after."""

    rows: RowsReading
    answers: dict[Hosted, int]


class Checkpoints:
    """The checkpoints of one partition's sessions.

    Args:
        config: says how often.
        host: holds the sessions and their rows.
        partition: its number.
        allowance: bytes a second, of all partitions together.
    """

    def __init__(
        self, config: WorkerConfig, host: Host, partition: int, allowance: Allowance
    ) -> None:
        self.config, self.host = config, host
        self._partition, self._allowance = partition, allowance
        self._dirty: dict[str, tuple[float, Hosted]] = {}  # moved since; the oldest first
        self._reading: _Reading | None = None

    def moved(self, hosted: Hosted) -> None:
        """The session's state is ahead of its checkpoint from now on, if it was not before."""
        known = self._dirty.get(hosted.session)
        if known is None or known[1] is not hosted:
            self._dirty.pop(hosted.session, None)  # so that the oldest stay first
            self._dirty[hosted.session] = (time.monotonic(), hosted)

    def written(self, hosted: Hosted) -> None:
        """A checkpoint is in Redis; what the session is answered after it makes it move again."""
        self._dirty.pop(hosted.session, None)

    @property
    def oldest_s(self) -> float:
        """How long the state longest ahead of its checkpoint has been so."""
        for since, _ in self._dirty.values():
            return time.monotonic() - since
        return 0.0

    @property
    def next_due_s(self) -> float:
        """Seconds until the next is due."""
        if self._reading or self.host.residents.changing(self._partition):
            return 0.001
        interval_s = self.config.checkpoint_interval_s
        for since, _ in self._dirty.values():
            return max(since + interval_s - time.monotonic(), 0.01)
        return self.config.sweep_s

    @property
    def due(self) -> bool:
        """Whether there is any checkpoint to look after now."""
        if self._reading or self.host.residents.changing(self._partition):
            return True
        return self.oldest_s > self.config.checkpoint_interval_s

    @property
    def came(self) -> bool:
        """Whether rows that were asked for have come."""
        return self._reading is not None and self._reading.rows.ready

    @property
    def held(self) -> Container[Hosted]:
        """Sessions whose row is on its way: what they answered is written with it."""
        return self._reading.answers if self._reading else ()

    def take(self, acting: Mapping[str, Hosted], *, everything: bool) -> dict[Hosted, Saved]:
        """The checkpoints that are to be written now; begins to read others that are due.

        Args:
            acting: sessions with answers or an action to write.
            everything: every state that is ahead is to be written, and waited for.
        """
        if self._reading:
            # Whoever ends, or is handed back, does not wait for this.
            self._reading.answers = {
                h: k for h, k in self._reading.answers.items() if not (h.gone or h.action)
            }
        handed = [
            h
            for h in acting.values()
            if h.action == "handback"
            and not h.in_flight
            and h.settled
            and (h.answers or h.session in self._dirty)
        ]
        if everything:
            self._reading = None
            return self._finish(self._begin(list(dict.fromkeys([*self._due(0.0), *handed]))))
        saved = self._finish(self._begin(handed)) if handed else {}
        if self._reading is None:
            due = [h for h in self._worth_reading() if h not in saved]
            size = max(self.host.engine.pool.slot_bytes, 1)
            if due := due[: min(self._allowance.rows(size), ROWS_A_READ)]:
                self._reading = self._begin(due)
        if self._reading and self._reading.rows.ready:
            saved.update(self._finish(self._reading))
            self._reading = None
        return saved

    def _worth_reading(self) -> list[Hosted]:
        """Sessions whose checkpoint is due, once they are many, or one has waited long enough."""
        interval_s = self.config.checkpoint_interval_s
        due = self._due(interval_s)
        if (
            len(due) >= ROWS_A_READ // 2
            or self.oldest_s > interval_s + min(_GATHER_SHARE * interval_s, _GATHER_S)
            or self.host.residents.changing(self._partition)
        ):
            return due
        return []

    def _due(self, after_s: float) -> list[Hosted]:
        """Sessions whose checkpoint is due, the oldest first."""
        before = time.monotonic() - after_s
        due, gone = [], []
        restarting = self.host.engine.restarting
        for session, (since, hosted) in self._dirty.items():
            if hosted.gone:
                gone.append(session)
            elif since > before:
                break
            elif hosted.settled and not hosted.action and session not in restarting:
                due.append(hosted)
        for session in gone:
            del self._dirty[session]
        # Those that wait to change to another version run nothing until they have: they come first.
        return list(dict.fromkeys([*self.host.residents.may_change(self._partition), *due]))

    def _begin(self, due: list[Hosted]) -> _Reading:
        self._allowance.spend(max(self.host.engine.pool.slot_bytes, 1) * len(due))
        rows = self.host.rows.start_read([hosted.session for hosted in due])
        return _Reading(rows, {hosted: len(hosted.answers) for hosted in due})

    def _finish(self, reading: _Reading) -> dict[Hosted, Saved]:
        states = dict(zip(reading.rows.sessions, self.host.rows.fetch(reading.rows), strict=True))
        layout, residents = self.host.engine.model.spec.layout, self.host.residents
        saved = {}
        for hosted, answers in reading.answers.items():
            # It changes to another version only where this is its last state under the old one.
            last = answers == len(hosted.answers)
            weights = residents.next_of(hosted) if last else hosted.weights
            rests = residents.rests(hosted) if last else False
            state = b"" if rests else states[hosted.session]
            saved[hosted] = Saved(Checkpoint(state, layout, weights), answers)
        return saved
