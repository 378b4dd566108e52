"""The truth beside the protocol. No actor reads it; every script is checked against it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protocol_model.types import (
    MARK,
    REST,
    ZERO,
    Answer,
    Control,
    Entry,
    Id,
    Row,
    Violation,
    run_entry,
)

End = tuple[int, Id, str]  # incarnation, id of the last reply, reason


@dataclass
class Incarnation:
    tag: int
    state: int = REST
    done: Id = ZERO
    last_reply: Id = ZERO
    ended: bool = False
    end: End | None = None
    since: list[tuple[Id, bool]] = field(default_factory=list)  # after the cursor: id, erred


class Oracle:
    def __init__(self, suspect: int, deaths_allowed: int) -> None:
        self.suspect, self.deaths_allowed = suspect, deaths_allowed
        self.now: dict[str, Incarnation] = {}
        self.pending: defaultdict[str, dict[Id, Entry]] = defaultdict(dict)
        self.aside: dict[str, tuple[Incarnation, dict[Id, Entry]]] = {}
        self.has_read_end: Callable[[str, End], bool] = lambda _s, _end: True
        self.process: Callable[[str], Any] = lambda _w: None
        self.guilty: Counter[str] = Counter()  # deaths by the session itself since its last answer
        self.unlucky: Counter[str] = Counter()  # other deaths or pauses during its own trial
        self.runs: Counter[int] = Counter()  # runs of an entry
        self.kills: Counter[int] = Counter()  # of which these killed
        self.kills_since: Counter[str] = Counter()  # by an owner, since the session's last answer
        self.retries: Counter[str] = Counter()
        self.stats: Counter[str] = Counter()

    # -- running entries
    def kills_worker(self, s: str, e: Entry, owns: bool) -> bool:
        n = self.runs[e.uid]
        self.runs[e.uid] += 1
        if not e.poison or (e.poison.startswith("first") and n >= int(e.poison[5:])):
            return False
        if e.poison == "again" and n == 0:
            return False
        self.kills[e.uid] += 1
        self.kills_since[s] += owns
        if self.kills_since[s] > self.deaths_allowed:
            raise Violation("too-many-deaths", f"{s} {e}")
        return True

    # -- streams
    def pushed(self, s: str, i: Id, e: Entry) -> None:
        self.pending[s][i] = e

    def opened(self, s: str, c: Control) -> None:
        old = self.now.get(s)
        if old:
            if c.tag <= old.tag:
                raise Violation("stale-open", f"{s} {c.tag} over {old.tag}")
            if not old.ended:
                raise Violation("open-over-open", s)
            if not self.has_read_end(s, old.end):
                raise Violation("unread-out-deleted", s)
        self.now[s] = Incarnation(c.tag)
        self.clear(s)
        self.stats["incarnations"] += 1

    def closed_by(self, s: str, c: Control) -> None:
        if c.tag != self.now[s].tag:
            raise Violation("stale-close", f"{s} {c.tag} hits {self.now[s].tag}")

    def clear(self, s: str) -> None:
        self.guilty[s] = self.unlucky[s] = self.kills_since[s] = 0

    def replied(self, s: str, i: Id, added: bool) -> None:
        inc = self.now[s]
        if inc.ended:
            raise Violation("reply-after-end", f"{s} {i}")
        if not added or i <= inc.last_reply:
            raise Violation("reply-order", f"{s} {i} after {inc.last_reply}")
        inc.last_reply = i

    def answered(self, s: str, a: Answer) -> None:
        inc, pending = self.now[s], self.pending[s]
        if a.entry.tag != inc.tag:
            raise Violation("foreign-frame", f"{s} {a.id} of {a.entry.tag} ran in {inc.tag}")
        if not pending or next(iter(pending)) != a.id:
            raise Violation("not-the-oldest", f"{s} {a.id}, pending {list(pending)[:3]}")
        if a.id <= inc.done:
            raise Violation("answered-twice", f"{s} {a.id}")
        del pending[a.id]
        state, reply = run_entry(inc.state, a.entry)
        erred = a.reply[0] == "error"
        if a.reply == ("error", "launch"):  # a failed launch: an error for good, nothing changed
            state, reply = inc.state, a.reply
        if reply != a.reply:
            raise Violation("not-the-fold", f"{s} {a.id}")
        inc.state, inc.done = state, a.id
        inc.since.append((a.id, erred))
        self.clear(s)
        self.stats["replies"] += 1

    def checkpointed(self, s: str, row: Row, state: int) -> None:
        inc = self.now[s]
        if row.done != inc.done or state != inc.state:
            raise Violation("checkpoint-state", f"{s} at {row.done}")
        inc.since = []
        self.stats["checkpoints"] += 1

    def ended(self, s: str, reason: str, cancelled: int) -> None:
        inc = self.now[s]
        if cancelled != len(self.pending[s]):
            raise Violation("cancelled-count", f"{s} {cancelled}, is {len(self.pending[s])}")
        if reason == "idle" and cancelled:
            raise Violation("idle-cancels", f"{s} {cancelled}")
        if reason == "replay_gap":
            raise Violation("false-replay-gap", s)
        inc.ended, inc.end = True, (inc.tag, inc.last_reply, reason)
        self.pending[s].clear()
        self.stats[f"end {reason}"] += 1

    # -- deaths, set aside, retry
    def taken(self, s: str, old: str, epoch: int) -> None:
        """A session is taken from `old` because that looks dead: what really was the matter?"""
        w = self.process(old)
        if w.exited:
            raise Violation("left-behind", f"{s} by {old}, which had drained")
        if w.killed_by == s:
            self.guilty[s] += 1
        elif w.killed_by is None and w.trial and (w.trial.s, w.trial.epoch) == (s, epoch):
            self.unlucky[s] += 1

    def set_aside(self, s: str, blamed: Entry | None, after_cursor: list[Entry]) -> None:
        enough = self.deaths_allowed - self.suspect
        if not self.guilty[s] and self.unlucky[s] < enough:
            raise Violation("innocent-set-aside", f"{s} after {self.unlucky[s]} unlucky trials")
        self.stats["set aside unlucky" if not self.guilty[s] else "set aside"] += 1
        again = any(e.poison == "again" for e in after_cursor)
        if not self.unlucky[s] and not again and not (blamed and blamed.poison):
            raise Violation("wrong-blame", f"{s} {blamed}")
        self.aside[s] = (self.now[s], dict(self.pending[s]))
        if blamed:
            self.pending[s].pop(next(iter(self.pending[s])))

    def retried(self, s: str) -> None:
        inc, pending = self.aside.pop(s)
        if self.now[s] is not inc or self.pending[s]:
            raise Violation("stale-retry", s)
        if not self.has_read_end(s, inc.end):
            raise Violation("unread-out-deleted", f"{s} by retry")
        inc.ended, inc.last_reply = False, ZERO
        self.pending[s] = pending
        self.clear(s)
        self.retries[s] += 1
        self.stats["retries"] += 1

    # -- what must hold between any two commands
    def check(self, redis: Any, s: str) -> None:
        part, row, inc = redis.part(s), redis.row.get(s), self.now.get(s)
        open_ = row is not None and row.status != "closed"
        if (open_ and row.status == "waiting") != (s in part.waiting):
            raise Violation("waiting-set", s)
        if open_ != (s in part.sessions):
            raise Violation("sessions-set", s)
        if inc and inc.ended == open_:
            raise Violation("end-and-row", s)
        owners = [w for w, owned in part.owned.items() if s in owned]
        if owners != ([row.owner] if open_ and row.owner else []):
            raise Violation("owned-set", f"{s} {owners}")
        if not open_:
            return
        if not row.cursor <= row.done or row.done != inc.done:
            raise Violation("cursor-done", f"{s} {row.cursor} {row.done} {inc.done}")
        if row.count != len(inc.since) or row.skipped != [i for i, erred in inc.since if erred]:
            raise Violation("count-skipped", f"{s} {row.count},{row.skipped} is {inc.since}")
        stream = redis.in_.get(s)
        unanswered = [i for i, e in stream.between(row.done) if e.kind != MARK] if stream else []
        if unanswered != list(self.pending[s]):
            raise Violation("entries-lost", f"{s} {unanswered} of {list(self.pending[s])}")
