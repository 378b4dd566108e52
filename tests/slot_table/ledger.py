"""What must be true of Redis alone, whatever the model says: no entry lost, none answered twice.

A producer can keep this account: what it has pushed and not taken back, in each life of a
session (from one end to the next).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from slot_table.store import SESSIONS, WORKERS, Fields, key
from slotstream.ids import ZERO, EntryId

Life = tuple[str, int]


class Ledger:
    """The entries of every life of every session, and the highest epochs seen."""

    def __init__(self) -> None:
        self.pushed: dict[Life, set[EntryId]] = defaultdict(set)
        self.before: dict[Life, EntryId] = defaultdict(lambda: ZERO)
        """Up to here, a session that came back was answered in an earlier life."""
        self.lost: set[Life] = set()
        self.epochs: dict[str, int] = defaultdict(int)

    def push(self, session: str, ends: int, entry: EntryId) -> None:
        self.pushed[session, ends].add(entry)

    def withdraw(self, session: str, ends: int, *entries: EntryId) -> None:
        self.pushed[session, ends].difference_update(entries)

    def come_back(
        self, session: str, ends: int, done: EntryId, entries: dict[EntryId, Fields]
    ) -> None:
        """A session that was set aside goes on with these entries; of the replies none is left."""
        self.pushed[session, ends] = set(unmarked(entries))
        self.before[session, ends] = done

    def lose(self, session: str, ends: int) -> None:
        """Redis has lost the row: nobody knows any more what has been answered."""
        self.lost.add((session, ends))

    def check(self, now: dict[str, Any], ends: dict[str, int], lost_rows: set[str]) -> None:
        """Compare with what Redis holds, as `store.read` gives it."""
        rows = {session: now[key("slot", session)] for session in SESSIONS}
        live = {s for s in SESSIONS if rows[s] and rows[s]["status"] != "closed"}
        waiting = {s for s in live if rows[s]["status"] == "waiting"}
        assert now["sessions"] - lost_rows == live - lost_rows
        assert set(now["queue"]) - lost_rows == waiting - lost_rows
        for session in live - lost_rows:
            self.owned_by_one(session, rows[session], now)
            self.answered_once(session, rows[session], now, (session, ends[session]))
            assert now[f"expire {session}"] == (False, False)
        for session in set(SESSIONS) - live:
            out = now[key("out", session)]
            assert now[f"expire {session}"][0] == bool(rows[session])
            assert session in lost_rows or now[f"expire {session}"][1] == bool(out)
            if out and session not in lost_rows:
                self.ended_whole(out, (session, ends[session] - 1))
        for session in now["aside"]:
            assert now[key("aside", session)]
            assert not now[key("aside", session)]["at"] or now[key("aside-in", session)]

    def owned_by_one(self, session: str, row: dict[str, str], now: dict[str, Any]) -> None:
        owners = [worker for worker in WORKERS if session in now[f"owned {worker}"]]
        assert owners == ([row["owner"]] if row["owner"] else [])
        assert bool(row["owner"]) == (row["status"] != "waiting")
        epoch = int(row["epoch"])
        if epoch:  # one that nobody has owned yet has none
            assert epoch >= self.epochs[session], "epochs only rise"
            self.epochs[session] = epoch

    def answered_once(
        self, session: str, row: dict[str, str], now: dict[str, Any], life: Life
    ) -> None:
        cursor, done = EntryId.parse(row["cursor"]), EntryId.parse(row["done"])
        assert cursor <= done
        if life in self.lost:
            return
        held, out, pushed = now[key("in", session)], now[key("out", session)], self.pushed[life]
        answered = {i for i in pushed if self.before[life] < i <= done}
        assert {i for i, f in out.items() if "output" in f or "error" in f} == answered
        kept = {i for i in pushed if i > cursor}
        assert set(unmarked(held)) == kept, "`in` is what the checkpoint does not cover"

    def ended_whole(self, out: dict[EntryId, Fields], life: Life) -> None:
        """What has no reply is counted in the last one."""
        *_, last = out.values()
        assert last["end"] == "1"
        if life not in self.lost:
            unanswered = {i for i in self.pushed[life] if i > self.before[life]} - out.keys()
            assert int(last["cancelled"]) == len(unanswered)


def unmarked(entries: dict[EntryId, Fields]) -> Iterable[EntryId]:
    """All but the marks of closes."""
    return (entry for entry, fields in entries.items() if "op" not in fields)
