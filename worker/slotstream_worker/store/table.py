"""The slot table: who owns a session, how far it is, what its neurons hold. Scripts do it all.

Every change is one atomic script with its fences in it, so a call may be repeated when its
answer was lost. Values cross here as Redis gives them: ids stay bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from redis.exceptions import NoScriptError

from slotstream.arguments import Arg
from slotstream.ids import EntryId
from slotstream.lines import Line
from slotstream.names import Keys
from slotstream_worker.store.commits import Answer, Batch, Checkpoint, Commit
from slotstream_worker.store.luascripts import script

__all__ = ["Answer", "Checkpoint", "Commit", "Fence", "Position", "Row", "SlotTable", "Taken"]

CLAIM_BYTES = 8 * 2**20
SESSIONS_A_TAKE = 16


class Fence(NamedTuple):
    """What a session's row says of its owner, and of how far it is."""

    status: str
    owner: str
    epoch: bytes
    done: EntryId
    cuts: bytes = b"0"


class Position(NamedTuple):
    """How far a worker is with a session; ids as Redis writes them."""

    session: str
    epoch: bytes
    cuts: bytes
    done: bytes
    read_to: bytes


@dataclass(frozen=True)
class Row:
    """A session's row as its new owner gets it. No `state` bytes: the session is at rest."""

    session: str
    epoch: bytes
    cursor: EntryId
    done: EntryId
    cuts: bytes
    count: int
    skipped: frozenset[EntryId]
    weights: str
    layout: str
    state: bytes
    attempts: int = 0

    @classmethod
    def parse(cls, raw: Sequence[bytes]) -> Row:
        """Read a row as the scripts return it."""
        session, epoch, cursor, done, cuts, count, skipped, weights, layout, state, attempts = raw
        return cls(
            session.decode(),
            epoch,
            EntryId.parse(cursor),
            EntryId.parse(done),
            cuts,
            int(count),
            frozenset(map(EntryId.parse, skipped.split())),
            weights.decode(),
            layout.decode(),
            state,
            int(attempts or 0),
        )


@dataclass(frozen=True)
class Taken:
    """Outcome of `take`: rows now owned; how many were put back, were closed, were set aside."""

    rows: list[Row] = field(default_factory=list)
    put_back: int = 0
    closed: int = 0
    set_aside: int = 0


class SlotTable:
    """The slot table of one partition, as one worker sees it.

    Args:
        line: the connection its scripts run on.
        keys: the partition.
        worker: the worker's own name, `<name>.<nonce>`.
        reply_ttl_s: how long the replies of a closed session stay.
        retention: how many replies an open session keeps.
        max_attempts: owners a session may have ended before it is set aside.
        declares: name every key in each call, as a cluster needs; otherwise one is enough.
    """

    def __init__(
        self,
        line: Line,
        keys: Keys,
        worker: str,
        *,
        reply_ttl_s: float,
        retention: int,
        max_attempts: int,
        declares: bool = False,
    ) -> None:
        self.line, self.keys, self.worker = line, keys, worker
        self._common: tuple[Arg, ...] = (
            *(keys.prefix, int(reply_ttl_s * 1000), retention, max_attempts),
        )
        self._declares = declares

    def apply_control(self, entries: Sequence[tuple[bytes, str]]) -> tuple[int, int]:
        """Apply control entries (ids and sessions) as read from the start of the stream.

        Returns how many were applied, and how many were not understood.
        """
        args = [part for entry in entries for part in entry]
        applied, ignored = self._run("control", [s for _, s in entries], *args)
        return applied, ignored

    def claim(self, sessions: Sequence[str], weights: str = "") -> list[Row]:
        """Own sessions that wait, those among them that still do.

        Those that have never run begin on the version `weights`, and their rows say so.
        """
        raws = self._run("claim", sessions, self.worker, CLAIM_BYTES, weights, *sessions)
        return [Row.parse(raw) for raw in raws]

    def take(self, sessions: Iterable[bytes], old: str, why: str, room: int) -> Taken:
        """Take what `old` owns; `why` is `dead`, `name`, `self` or `leave` (see take.lua)."""
        taken = Taken()
        names = [raw.decode() for raw in sessions]
        # Called for no sessions too: a worker that owns nothing is then forgotten.
        for part in list(_parts(names, SESSIONS_A_TAKE)) or [[]]:
            raws, *counts = self._run(
                "take", part, self.worker, old, why, room - len(taken.rows), *part, also=(old,)
            )
            taken = Taken(
                [*taken.rows, *map(Row.parse, raws)],
                *(a + b for a, b in zip(_counts(taken), counts, strict=True)),
            )
        return taken

    def commit(
        self, commits: Sequence[Commit], *, weights: str = "", layout: str = ""
    ) -> list[str]:
        """Commit many sessions; for each `ok`, `applied`, `lost`, `full`, `refused` or `busy`."""
        results: list[str] = []
        batch = Batch(weights, layout)
        for k, commit in enumerate(commits):
            batch.add(commit)
            if batch.full or k == len(commits) - 1:
                self.send_commits(batch, self.line)
                unusual = batch.results(self.receive_commits(batch, self.line))
                results += [unusual.get(n, "ok") for n in range(len(batch.sessions))]
                batch = Batch(weights, layout)
        return results

    def send_commits(self, batch: Batch, line: Line, *, whole: bool = False) -> None:
        """Send a batch; the line's next answer is for `Batch.results`.

        That answer is `NoScriptError` where Redis does not know the script (any more); nothing was
        carried out then, and the batch is sent again, `whole`.
        """
        keys, args = self._call(batch.sessions, (self.worker, batch.weights, batch.layout))
        line.send_script(script("commit"), keys, args, batch.args, whole=whole)

    def receive_commits(self, batch: Batch, line: Line) -> Any:
        """The answer to a batch that was the last thing sent."""
        try:
            return line.receive()
        except NoScriptError:
            self.send_commits(batch, line, whole=True)
            return line.receive()

    def begin_trial(self, session: str, epoch: bytes, cuts: bytes) -> bool:
        """Say that a suspect is about to run alone; False where its row is not what was claimed."""
        return bool(self._run("trial", [session], self.worker, session, epoch, cuts))

    def forget(self, last_ids: Mapping[str, EntryId]) -> int:
        """Tell the readers of sessions whose rows Redis has lost; returns how many."""
        told = 0
        for part in _parts(list(last_ids), SESSIONS_A_TAKE):
            args = [arg for session in part for arg in (session, str(last_ids[session]))]
            told += int(self._run("forget", part, *args))
        return told

    def owned(self, worker: str | None = None) -> set[bytes]:
        """Sessions that a worker (by default this one) owns."""
        return set(self.line.call("SMEMBERS", self.keys.owned(worker or self.worker)))

    def workers(self) -> list[str]:
        """Workers that may own something, dead ones among them."""
        return sorted(raw.decode() for raw in self.line.call("SMEMBERS", self.keys.workers))

    def alive(self, workers: Sequence[str]) -> list[bool]:
        """Which of the workers hold a lease."""
        return [
            bool(answer)
            for answer in self.line.calls([("EXISTS", self.keys.lease(w)) for w in workers])
        ]

    def count_owned(self) -> int:
        """How many sessions this worker owns."""
        return int(self.line.call("SCARD", self.keys.owned(self.worker)))

    def compare(self, sessions: Sequence[Position]) -> tuple[dict[str, Fence | None], list[str]]:
        """What differs from what is held: rows that are not this worker's, live, and so far.

        Returns:
            What fences each such row, None where there is no row; and the sessions whose stream
            holds an entry behind the last one read.
        """
        args = [arg for position in sessions for arg in position]
        others, unread = self._run("sweep", [one.session for one in sessions], self.worker, *args)
        differ: dict[str, Fence | None] = {}
        for k in range(0, len(others), 6):
            number, *row = others[k : k + 6]
            differ[sessions[number - 1].session] = _fence(*row) if row[0] else None
        return differ, [sessions[number - 1].session for number in unread]

    def fences(self, sessions: Sequence[str]) -> list[Fence | None]:
        """What fences each session's row; None where there is no row at all."""
        commands = [
            ("HMGET", self.keys.row(s), "status", "owner", "epoch", "done", "cuts")
            for s in sessions
        ]
        found: list[Fence | None] = []
        for answer in self.line.calls(commands):
            if isinstance(answer, Exception):
                if not str(answer).startswith("WRONGTYPE"):
                    raise answer
                found.append(None)
                continue
            found.append(None if answer[0] is None else _fence(*answer))
        return found

    def _run(self, name: str, sessions: Iterable[str], *args: Arg, also: Sequence[str] = ()) -> Any:
        return self.line.script(script(name), *self._call(sessions, args, also))

    def _call(
        self, sessions: Iterable[str], args: Iterable[Arg], also: Sequence[str] = ()
    ) -> tuple[list[Arg], list[Arg]]:
        """Keys and arguments of a script's call."""
        keys: list[Arg] = [self.keys.control]
        if self._declares:
            keys += self.keys.shared(self.worker, *also)
            keys += [key for session in sessions for key in self.keys.of(session)]
        return keys, [*self._common, *args]


def _fence(
    status: bytes,
    owner: bytes | None,
    epoch: bytes | None,
    done: bytes | None,
    cuts: bytes | None,
) -> Fence:
    done_id = EntryId.parse(done or b"0-0")
    return Fence(status.decode(), (owner or b"").decode(), epoch or b"", done_id, cuts or b"0")


def _counts(taken: Taken) -> tuple[int, int, int]:
    return taken.put_back, taken.closed, taken.set_aside


def _parts(items: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
