"""One session as its worker holds it: how far it is, what waits, what is to be written."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import monotonic

from slotstream.ids import EntryId
from slotstream_worker.entries import Entry
from slotstream_worker.store.table import Answer

SUSPICIOUS = 2
"""Attempts from which a session is run alone; the deaths of a whole company count to here."""


@dataclass(slots=True, eq=False)
class Hosted:
    """One session here, under one epoch.

    `base` is the id of the last entry whose answer Redis has, `position` that of the last entry
    that ran, `read_to` that of the last entry read. Entries up to `replay_to` have been answered
    by an owner before: they run again, and nothing is published. `paused`: its reader is behind,
    and it asked that no reply be lost. `held`: why it cannot run here at all; nothing of it is
    changed, and it goes to another worker when this one drains. `attempts`: owners that died with
    entries of it under way.
    """

    session: str
    partition: int
    epoch: bytes
    cuts: bytes
    base: EntryId
    position: EntryId
    read_to: EntryId
    replay_to: EntryId
    weights: str
    queue: deque[Entry] = field(default_factory=deque)
    answers: list[Answer] = field(default_factory=list)
    in_flight: bool = False
    paused: bool = False
    held: str = ""
    attempts: int = 0
    active_at: float = field(default_factory=monotonic)
    action: str = ""
    reason: str = ""
    mark: str = ""

    @property
    def settled(self) -> bool:
        """Whether the row on the device is the state after the last answer."""
        return self.position >= self.replay_to and not self.held

    @property
    def suspect(self) -> bool:
        """Whether it may be what killed its owners: it then runs alone."""
        return self.attempts >= SUSPICIOUS

    @property
    def wants_more(self) -> bool:
        """Whether its stream is to be read on: a suspect needs an entry that nobody answered."""
        if self.held or self.action == "end":
            return False
        return not self.queue or (self.suspect and self.queue[-1].id <= self.replay_to)

    @property
    def runnable(self) -> bool:
        """Whether its oldest entry may go into a round."""
        return bool(self.queue) and not (self.action or self.in_flight or self.paused or self.held)
