"""What is kept of one session: its row, its streams, and what a test can know beside them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from slot_table.store import Fields
from slotstream.ids import ZERO, EntryId


def fold(state: bytes, entry: EntryId) -> bytes:
    """The served model: its state tells which entries it has run, in order."""
    return hashlib.sha1(state + str(entry).encode()).hexdigest().encode()


@dataclass
class Stream:
    entries: dict[EntryId, Fields] = field(default_factory=dict)
    last: EntryId = ZERO

    def add(self, entry: EntryId, fields: Fields) -> None:
        assert entry > self.last
        self.entries[entry], self.last = fields, entry

    def after(self, entry: EntryId) -> dict[EntryId, Fields]:
        return {i: f for i, f in self.entries.items() if i > entry}


@dataclass
class Held:
    """A row, and what a test can know beside it."""

    token: str
    replies: str
    status: str = "waiting"
    owner: str = ""
    epoch: int = 0
    cursor: EntryId = ZERO
    done: EntryId = ZERO
    state: bytes = b""
    layout: str = ""
    weights: str = ""
    count: int = 0
    skipped: list[EntryId] = field(default_factory=list)
    cuts: int = 0
    attempts: int = 0
    trial: int = 0
    mark: EntryId | None = None
    now: bytes = b""
    """The state after `done`, as every owner must come to it."""

    def fields(self) -> dict[str, Any]:
        return {
            "status": self.status, "owner": self.owner, "epoch": str(self.epoch),
            "cursor": str(self.cursor), "done": str(self.done), "state": self.state.decode(),
            "layout": self.layout, "weights": self.weights, "count": str(self.count),
            "skipped": list(map(str, self.skipped)), "cuts": str(self.cuts),
            "attempts": str(self.attempts), "trial": str(self.trial), "token": self.token,
            "mark": str(self.mark) if self.mark else "", "replies": self.replies,
        }  # fmt: skip


@dataclass
class Slot:
    """All that is kept of one session's name."""

    row: Held | None = None
    tomb: dict[str, str] | None = None
    inbox: Stream | None = None
    out: Stream | None = None
    out_expires: bool = False
    aside: tuple[Held, str] | None = None
    aside_in: Stream | None = None
    superseded: bool = False
    ends: int = 0
    """How often a session of this name has ended."""

    def behind(self, entry: EntryId) -> dict[EntryId, Fields]:
        return self.inbox.after(entry) if self.inbox else {}

    def unanswered(self) -> list[EntryId]:
        assert self.row
        return [i for i in self.behind(self.row.done) if i != self.row.mark]

    def largest(self) -> EntryId:
        """The larger of the last generated ids of `in` and `out`."""
        return max(stream.last if stream else ZERO for stream in (self.inbox, self.out))
