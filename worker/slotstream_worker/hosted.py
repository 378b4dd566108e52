"""One session as its worker holds it: how far it is, what waits, what is to be written."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import monotonic

from slotstream_worker.store.commits import Answer, Outputs, fence
from slotstream_worker.store.inbox import Raw

SUSPICIOUS = 2
"""Attempts from which a session is run alone; the deaths of a whole company count to here."""


@dataclass(slots=True, eq=False)
class Hosted:
    """One session here, under one epoch. Ids are as Redis writes them.

    `base` is the id of the last entry whose
    answer Redis has, `read_to` that of the last entry read. `unsettled`: how many entries, the one
    in flight and the first of `queue`, were answered by an owner before; they run again, and
    nothing is published. `more`: its stream may hold entries that have not been read. `usual`: all
    of `answers` are outputs. `even`: all of `queue` are frames, as far as is known. `listed`: it
    stands in the line of those that may run. `gone`: it is not held any more.

    `fence`: what its commits begin with, packed.

    `paused`: its reader is behind, and it asked that no reply be lost. `held`: why it cannot run
    here at all; nothing of it is changed, and it goes to another worker when this one drains.
    `attempts`: owners that died with entries of it under way.

    `weights`: the version that runs its entries, and ran those of `answers`. `halt`: why it runs
    nothing for the moment: `fetch`, its version is not here yet; `change`, it waits until nothing
    of it is under way, to change to another at its checkpoint.
    """

    session: str
    partition: int
    epoch: bytes
    cuts: bytes
    base: bytes
    read_to: bytes
    weights: str
    queue: deque[Raw] = field(default_factory=deque)
    answers: list[Outputs | Answer] = field(default_factory=list)
    usual: bool = True
    even: bool = True
    unsettled: int = 0
    in_flight: bool = False
    more: bool = True
    listed: bool = False
    gone: bool = False
    paused: bool = False
    held: str = ""
    halt: str = ""
    attempts: int = 0
    active_at: float = field(default_factory=monotonic)
    fence: bytes = field(init=False)
    action: str = ""
    reason: str = ""
    mark: str = ""

    def __post_init__(self) -> None:
        self.fence = fence(self.session, self.epoch, self.cuts)

    @property
    def settled(self) -> bool:
        """Whether its row is the state after the last answer: its replay is over."""
        return not (self.unsettled or self.held)

    @property
    def suspect(self) -> bool:
        """Whether it may be what killed its owners: it then runs alone."""
        return self.attempts >= SUSPICIOUS

    @property
    def runnable(self) -> bool:
        """Whether its oldest entry may go into a round."""
        return bool(self.queue) and not (
            self.action or self.in_flight or self.paused or self.held or self.halt
        )
