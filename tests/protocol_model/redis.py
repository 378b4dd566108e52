"""Redis, and every script of the protocol as one method that runs alone.

A name with an underscore is a part of scripts. The rest are scripts or plain
commands; a worker calls them by name, so that a call can be lost or come late.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from protocol_model.oracle import Oracle
from protocol_model.types import (
    LEASE,
    MARK,
    OPENED,
    ZERO,
    Answer,
    Control,
    Entry,
    Id,
    Row,
    Stream,
    Violation,
    after,
)

Claimed = tuple[str, Row] | None
Checkpoint = int | None  # the state after the last answer


@dataclass
class Partition:
    control: Stream = field(default_factory=Stream)
    waiting: dict[str, tuple[int, int]] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    owned: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    lease: dict[str, int] = field(default_factory=dict)
    epoch: int = 0
    arrivals: int = 0


@dataclass
class Aside:
    """What is kept of a session that was set aside: `slot` and `in`, renamed."""

    row: Row
    entries: Stream
    end: Id = ZERO  # of the reply that said so
    superseded: bool = False


class Redis:
    PARTITIONS = 2

    def __init__(self, oracle: Oracle, mutant: str = "") -> None:
        self.oracle, self.mutant = oracle, mutant
        self.suspect, self.deaths_allowed = oracle.suspect, oracle.deaths_allowed
        self.now = 1000
        self.parts = [Partition() for _ in range(self.PARTITIONS)]
        self.in_: dict[str, Stream] = {}
        self.out: dict[str, Stream] = {}
        self.row: dict[str, Row] = {}
        self.aside: dict[str, Aside] = {}
        self.order: dict[str, tuple[str, int, int]] = {}  # by worker: what, serial, how many
        self.touched: set[str] = set()

    def part_of(self, s: str) -> int:
        return ord(s[0]) % self.PARTITIONS

    def part(self, s: str) -> Partition:
        return self.parts[self.part_of(s)]

    def _in(self, s: str) -> Stream:
        return self.in_.setdefault(s, Stream())

    def _out(self, s: str) -> Stream:
        return self.out.setdefault(s, Stream())

    def _auto(self, st: Stream) -> Id:
        return max((self.now, 0), after(st.last))

    # -- plain commands
    def alive(self, p: int, w: str) -> bool:
        return self.parts[p].lease.get(w, -1) > self.now

    def renew(self, p: int, w: str) -> None:
        self.parts[p].lease[w] = self.now + LEASE

    def push(self, s: str, i: Id | None, e: Entry) -> Id | None:
        st = self._in(s)
        i = i or self._auto(st)
        if not st.add(i, e):
            return None
        self.oracle.pushed(s, i, e)
        return i

    def delete(self, s: str, keys: str) -> None:
        if "in" in keys:
            self.in_.pop(s, None)
            self.oracle.pending[s].clear()
        if "out" in keys:
            self.out.pop(s, None)

    def expire(self, s: str) -> None:
        """A closed session's tombstone and replies expire, long after its last control entry."""
        queued = any(c.session == s for c in self.part(s).control.entries.values())
        if s in self.row and self.row[s].status == "closed" and not queued:
            del self.row[s]
            self.out.pop(s, None)

    def push_control(self, c: Control) -> None:
        st = self.part(c.session).control
        st.add(self._auto(st), c)

    # -- control
    def apply_control(self, p: int, head: list[tuple[Id, Control]]) -> None:
        """`head`: the oldest entries, as somebody saw them some time ago."""
        entries = self.parts[p].control.entries
        for i, c in head:
            if self.mutant == "control-unchecked":
                entries.pop(i, None)
            elif i not in entries:
                continue
            elif i != next(iter(entries)):
                break
            else:
                del entries[i]
            self._apply(c)

    def _apply(self, c: Control) -> None:
        s, row = c.session, self.row.get(c.session)
        self.touched.add(s)
        if c.op == "open":
            if row and (row.status != "closed" or (c.token and row.token == c.token)):
                return
            self.oracle.opened(s, c)
            self.out.pop(s, None)
            if s in self.aside and self.mutant != "not-superseded":
                self.aside[s].superseded = True
            self.row[s] = Row(token=c.token)
            self.part(s).sessions.add(s)
            self._enqueue(s, 1)
        elif row and row.status in ("waiting", "live"):
            self.oracle.closed_by(s, c)
            if row.status == "waiting":
                self._finish(s, "close")
            else:
                row.status = "closing"
                st = self._in(s)
                st.add(self._auto(st), Entry(MARK))

    def _enqueue(self, s: str, rank: int) -> None:
        part = self.part(s)
        part.arrivals += 1
        part.waiting[s] = (rank, part.arrivals)

    def _finish(
        self, s: str, reason: str, answer: Answer | None = None, blamed: Id | None = None
    ) -> None:
        """Closing: the last reply, `in` deleted, the row a tombstone."""
        row, part, st, out = self.row[s], self.part(s), self._in(s), self._out(s)
        self.touched.add(s)
        if answer:
            self._publish(s, answer)
        at = answer.id if answer else blamed or row.done
        cancelled = sum(e.kind != MARK for _, e in st.between(at))
        if not answer:
            last = blamed or after(max(st.last, out.last))
            self.oracle.replied(s, last, out.add(last, [self.oracle.now[s].tag, None]))
        out.entries[out.last][1] = reason
        self.oracle.ended(s, reason, cancelled)
        self.in_.pop(s, None)
        part.waiting.pop(s, None)
        part.sessions.discard(s)
        part.owned[row.owner].discard(s)
        self.row[s] = Row(status="closed", token=row.token)

    # -- ownership
    def _own(self, s: str, w: str) -> Claimed:
        row, part = self.row[s], self.part(s)
        part.owned[row.owner].discard(s)
        part.owned[w].add(s)
        part.epoch += 1
        row.status, row.owner, row.epoch = "live", w, part.epoch
        part.waiting.pop(s, None)
        out = self._out(s)
        if out.last == ZERO or self.mutant == "opened-every-claim":
            self.oracle.replied(s, OPENED, out.add(OPENED, [self.oracle.now[s].tag, None]))
        self.touched.add(s)
        return s, row.copy()

    def claim_waiting(self, p: int, w: str) -> Claimed:
        waiting = self.parts[p].waiting
        if not waiting or not self._may_claim(p, w):
            return None
        return self._own(min(waiting, key=lambda s: waiting[s]), w)

    def _may_claim(self, p: int, w: str) -> bool:
        return self.alive(p, w) or self.mutant == "claim-without-lease"

    def _taken(self, s: str, old: str, epoch: int, expired: bool) -> bool:
        """Take a session from its dead owner. False: it was not his any more, or is closed now."""
        row = self.row.get(s)
        if not row or row.status not in ("live", "closing"):
            return False
        if row.owner != old or row.epoch != epoch:
            return False
        if expired and self.alive(self.part_of(s), old):
            return False
        if row.status == "closing":
            self._finish(s, "close")
            return False
        self.oracle.taken(s, old, epoch)
        self._count_death(s)
        if row.attempts < self.deaths_allowed:
            return True
        self._set_aside(s)
        return False

    def _count_death(self, s: str) -> None:
        row, m = self.row[s], self.mutant
        unanswered_only = m == "count-unanswered-only"
        if not any(True for _ in self._in(s).between(row.done if unanswered_only else row.cursor)):
            return  # nothing that it could have been running
        if m in ("trial-adds", "min-literal"):  # the trial has counted already
            grown = min(row.attempts + 1, self.suspect)
            row.attempts = grown if m == "min-literal" else max(row.attempts, grown)
        elif row.attempts < self.suspect or row.trial == row.epoch or m == "death-uncapped":
            row.attempts += 1

    def take(self, w: str, s: str, old: str, epoch: int, expired: bool = True) -> Claimed:
        """`expired` = False: from an older process of the own name, whatever its lease."""
        if not self._may_claim(self.part_of(s), w) or not self._taken(s, old, epoch, expired):
            return None
        return self._own(s, w)

    def put_back(self, s: str, old: str, epoch: int) -> None:
        if self._taken(s, old, epoch, True):
            self._requeue(s)

    def reclaim(self, w: str, s: str) -> Claimed:
        """The owner lost the answer of its claim, or dropped the session."""
        row = self.row.get(s)
        if not row or row.status not in ("live", "closing") or row.owner != w:
            return None
        if not self._may_claim(self.part_of(s), w):
            return None
        if row.status == "closing":
            self._finish(s, "close")
            return None
        return self._own(s, w)

    def _requeue(self, s: str) -> None:
        row = self.row[s]
        if row.status == "closing":
            return self._finish(s, "close")
        self.part(s).owned[row.owner].discard(s)
        row.status, row.owner = "waiting", ""
        self._enqueue(s, 0)
        self.touched.add(s)
        return None

    def hand_back(self, w: str, s: str, epoch: int, base: Id, ck: Checkpoint) -> str:
        unfenced = self.mutant == "hand-back-unfenced" and s in self.row
        if unfenced:
            unfenced = self.row[s].status in ("live", "closing")
        if not unfenced and (not self._fenced(w, s, epoch) or self.row[s].done != base):
            return "lost"
        if ck is not None:
            self._checkpoint(s, ck)
        self._requeue(s)
        return "ok"

    def leave(self, p: int, w: str) -> None:
        """The last word of a worker that exits in order: what it owns after all is put back."""
        part = self.parts[p]
        for s in sorted(part.owned[w]):
            self._requeue(s)
        part.lease.pop(w, None)

    # -- commit
    def _fenced(self, w: str, s: str, epoch: int) -> bool:
        row = self.row.get(s)
        if not row or row.status not in ("live", "closing") or row.owner != w:
            return False
        return row.epoch == epoch or self.mutant == "no-epoch"

    def commit(
        self, w: str, s: str, epoch: int, cuts: int, base: Id, answers: list[Answer], ck: Checkpoint
    ) -> str:
        if not self._fenced(w, s, epoch):
            return "lost"
        row = self.row[s]
        if self.mutant != "lost-keeps-trial":
            row.trial = 0  # its owner has lived to tell, whatever becomes of the answers
        if row.cuts != cuts and self.mutant != "no-cuts":
            return "lost"
        last = answers[-1].id if answers else base
        if row.done != base and self.mutant != "no-done":
            return "applied" if row.done == last else "lost"
        self._one_committer(row, epoch)
        self.touched.add(s)
        for a in answers:
            self._publish(s, a)
        row.done = last
        row.count += len(answers)
        if self.mutant != "no-skipped":
            row.skipped += [a.id for a in answers if a.reply[0] == "error"]
        if answers:
            row.attempts = 0
        if ck is not None:
            self._checkpoint(s, ck)
        return "ok"

    def _one_committer(self, row: Row, epoch: int) -> None:
        if row.epoch != epoch:
            raise Violation("two-committers", f"{epoch} under {row.epoch}")

    def _publish(self, s: str, a: Answer) -> None:
        self.oracle.replied(s, a.id, self._out(s).add(a.id, [self.oracle.now[s].tag, None]))
        self.oracle.answered(s, a)

    def _checkpoint(self, s: str, state: int) -> None:
        row, st = self.row[s], self._in(s)
        self.oracle.checkpointed(s, row, state)
        row.cursor, row.state, row.count, row.skipped = row.done, state, 0, []
        trim = [i for i in st.entries if i <= row.cursor]
        if self.mutant == "trim-one-more":
            trim = list(st.entries)[: len(trim) + 1]
        for i in trim:
            del st.entries[i]
        self.touched.add(s)

    def cancel(self, s: str, i: Id) -> bool:
        """By the producer: one entry that is not answered yet."""
        row, st = self.row.get(s), self.in_.get(s)
        if not st or i not in st.entries:
            return False
        if row and row.status != "closed":
            if i <= row.done:
                return False
            row.cuts += 1
            oldest = next(st.between(row.done))[0]
            if i == oldest and self.mutant != "cancel-keeps-attempts":
                row.attempts = row.trial = 0  # what it was suspected for is gone
                self.oracle.clear(s)
        del st.entries[i]
        del self.oracle.pending[s][i]
        self.touched.add(s)
        return True

    def end(
        self, w: str, s: str, epoch: int, cuts: int, base: Id, reason: str, answer: Answer | None
    ) -> str:
        if not self._fenced(w, s, epoch):
            return "lost"
        row = self.row[s]
        if self.mutant != "lost-keeps-trial":
            row.trial = 0
        if row.done != base or (row.cuts != cuts and self.mutant != "no-cuts"):
            return "lost"
        self._one_committer(row, epoch)
        self._finish(s, reason, answer)
        return "ok"

    def end_idle(self, w: str, s: str, epoch: int, base: Id) -> str:
        if not self._fenced(w, s, epoch) or self.row[s].done != base:
            return "lost"
        if any(True for _ in self._in(s).between(base)) and self.mutant != "idle-not-busy":
            return "busy"
        self._finish(s, "idle")
        return "ok"

    # -- sessions that kill
    def trial(self, w: str, s: str, epoch: int, cuts: int) -> str:
        """Before a suspect runs alone: should this owner die now, it was this session."""
        if not self._fenced(w, s, epoch) or self.row[s].cuts != cuts:
            return "lost"
        row = self.row[s]
        row.trial = epoch
        if self.mutant in ("trial-adds", "min-literal"):
            row.attempts += 1
        return "ok"

    def _set_aside(self, s: str) -> None:
        row, st = self.row[s], self._in(s)
        unanswered = list(st.between(row.done))
        blamed = unanswered[0] if unanswered else None
        after_cursor = [e for _, e in st.between(row.cursor)]
        self.oracle.set_aside(s, blamed[1] if blamed else None, after_cursor)
        kept = row.copy()
        if self.mutant == "aside-forgets-count":
            kept.count, kept.skipped = 0, []
        self.aside[s] = Aside(kept, st)
        self._finish(s, "quarantined", blamed=blamed[0] if blamed else None)
        self.aside[s].end = self.out[s].last

    def forget(self, s: str, end: Id) -> bool:
        """By a producer that has read `quarantined` at `end` and uses the id again.

        A DEL with a condition: False where an operator has had the session run again.
        """
        kept = self.aside.get(s)
        still = kept is not None and not kept.superseded and kept.end == end
        still = still or (s not in self.row and kept is None)
        open_ = s in self.row and self.row[s].status != "closed"
        if (open_ or not still) and self.mutant != "reuse-unasked":
            return False
        if kept and self.mutant != "not-superseded":
            kept.superseded = True
        self.delete(s, "in out")
        self.touched.add(s)
        return True

    def retry(self, s: str, epoch: int, discard: bool) -> str:
        """By an operator: `epoch` is that of the kept row, and names this setting aside."""
        kept, row = self.aside.get(s), self.row.get(s)
        if not kept or (kept.row.epoch != epoch and self.mutant != "retry-unnamed"):
            return "gone"
        if row and row.status != "closed":
            return "open"
        if kept.superseded:
            return "superseded"
        if s in self.in_ and not discard:
            return "busy"
        self.delete(s, "in")  # pushed to a closed session
        del self.aside[s]
        self.oracle.retried(s)
        self.out.pop(s, None)
        self.in_[s] = kept.entries
        kept.row.status, kept.row.owner = "waiting", ""
        if self.mutant != "retry-keeps-attempts":
            kept.row.attempts = 0
        self.row[s] = kept.row
        self.part(s).sessions.add(s)
        self._enqueue(s, 1)
        self.touched.add(s)
        return "ok"
