"""Values of the model: ids, streams, entries, rows, and the model that is served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

Id = tuple[int, int]
ZERO: Id = (0, 0)
OPENED: Id = (0, 1)
REST = 7
LEASE = 40
MARK = "mark"  # the `op` = `close` that the control script appends to `in`


class Violation(Exception):
    def __init__(self, kind: str, text: str = "") -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def after(i: Id) -> Id:
    return (i[0], i[1] + 1)


class Stream:
    """A Redis stream: rising ids, and a last id that outlives its entries."""

    def __init__(self) -> None:
        self.entries: dict[Id, Any] = {}
        self.last = ZERO

    def add(self, i: Id, value: Any) -> bool:
        if i <= self.last:
            return False
        self.entries[i] = value
        self.last = i
        return True

    def between(self, low: Id, high: Id | None = None) -> Iterator[tuple[Id, Any]]:
        """Entries with low < id <= high."""
        for i, value in self.entries.items():
            if i > low and (high is None or i <= high):
                yield i, value


@dataclass(frozen=True)
class Entry:
    """An entry of `in`; `tag`, `uid` and `poison` are the oracle's."""

    kind: str  # frame, reset, resetframe, endonly, bad, unknown, mark
    x: int = 0
    end: bool = False
    tag: int = -1
    uid: int = 0
    poison: str = ""  # always, first<k>: its first k runs kill; again: all but its first run kill


@dataclass(frozen=True)
class Control:
    op: str
    session: str
    token: str | None
    tag: int


@dataclass(frozen=True)
class Answer:
    id: Id
    entry: Entry
    reply: tuple[str, Any]


@dataclass
class Row:
    status: str = "waiting"
    owner: str = ""
    epoch: int = 0
    cursor: Id = ZERO
    done: Id = ZERO
    state: int = REST
    count: int = 0
    skipped: list[Id] = field(default_factory=list)
    cuts: int = 0
    attempts: int = 0
    trial: int = 0  # the epoch whose owner has begun to run this suspect alone
    token: str | None = None

    def copy(self) -> Row:
        return replace(self, skipped=list(self.skipped))


def run_entry(state: int, e: Entry) -> tuple[int, tuple[str, Any]]:
    """One step of the model. All or nothing: an entry that errs changes nothing."""
    if e.kind in ("bad", "unknown"):
        return state, ("error", e.kind)
    if e.kind == "reset":
        return REST, ("op", "reset")
    if e.kind == "endonly":
        return state, ("op", "end")
    state = hash((REST if e.kind == "resetframe" else state, e.x))
    return state, ("output", state)
