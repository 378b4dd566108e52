"""The slot table: who owns a session, how far it is, what its neurons hold. Scripts do it all.

Every change is one atomic script with its fences in it, so a call may be repeated when its
answer was lost. Values cross here as Redis gives them: ids stay bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slotstream.ids import EntryId
from slotstream.lines import Arg, Line
from slotstream.names import Keys
from slotstream_worker.store.luascripts import script

SESSIONS_A_CALL = 128
BYTES_A_CALL = 256 * 1024
"""A script holds Redis while it runs; these keep one to about a millisecond."""
CLAIM_BYTES = 8 * 2**20


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

    @classmethod
    def parse(cls, raw: Sequence[bytes]) -> Row:
        """Read a row as the scripts return it."""
        session, epoch, cursor, done, cuts, count, skipped, weights, layout, state = raw
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
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply: the id of the entry it answers, and its fields in the order they are sent.

    `effect` is False where the entry left the session's state as it was.
    """

    id: EntryId
    fields: tuple[bytes | str, ...]
    effect: bool = True

    @property
    def is_error(self) -> bool:
        """Whether it says that the entry was not run."""
        return self.fields[:1] == ("error",)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A session's state after the last of the answers it is committed with."""

    state: bytes
    layout: str
    weights: str


@dataclass(frozen=True, slots=True)
class Commit:
    """What is written of one session at once; `action` is ``""``, ``"handback"`` or ``"end"``."""

    session: str
    epoch: bytes
    cuts: bytes
    base: EntryId
    answers: Sequence[Answer] = ()
    checkpoint: Checkpoint | None = None
    action: str = ""
    reason: str = ""
    mark: str = ""

    def args(self) -> Iterator[Arg]:
        """The script's arguments."""
        yield from (
            self.session,
            self.epoch,
            self.cuts,
            str(self.base),
            self.action,
            self.reason,
            self.mark,
            len(self.answers),
            1 if self.checkpoint else 0,
        )
        if self.checkpoint:
            yield from (self.checkpoint.state, self.checkpoint.layout, self.checkpoint.weights)
        for answer in self.answers:
            yield from (
                str(answer.id),
                0 if answer.effect else 1,
                len(answer.fields) // 2,
                *answer.fields,
            )

    @property
    def nbytes(self) -> int:
        """About how much Redis has to write."""
        return (len(self.checkpoint.state) if self.checkpoint else 0) + sum(
            len(value) for answer in self.answers for value in answer.fields
        )


@dataclass(frozen=True)
class Taken:
    """Outcome of `take`: rows now owned, how many were put back in the queue, how many closed."""

    rows: list[Row] = field(default_factory=list)
    put_back: int = 0
    closed: int = 0


class SlotTable:
    """The slot table of one partition, as one worker sees it.

    Args:
        line: the connection its scripts run on.
        keys: the partition.
        worker: the worker's own name, `<name>.<nonce>`.
        reply_ttl_s: how long the replies of a closed session stay.
        retention: how many replies an open session keeps.
    """

    def __init__(
        self, line: Line, keys: Keys, worker: str, *, reply_ttl_s: float, retention: int
    ) -> None:
        self.line, self.keys, self.worker = line, keys, worker
        self._common: tuple[Arg, ...] = (keys.prefix, int(reply_ttl_s * 1000), retention)

    def apply_control(self, limit: int = 64) -> tuple[int, int, int]:
        """Apply the oldest control entries; how many were applied, not understood, are left."""
        applied, ignored, left = self._run("control", limit)
        return applied, ignored, left

    def claim(self, room: int) -> list[Row]:
        """Own the sessions that have waited longest, `room` at most."""
        return [
            Row.parse(raw)
            for raw in self._run("claim", self.worker, min(room, SESSIONS_A_CALL), CLAIM_BYTES)
        ]

    def take(self, sessions: Iterable[bytes], old: str, why: str, room: int) -> Taken:
        """Take what `old` owns: it is `dead`, of the same `name`, or the worker `self`."""
        rows: list[Row] = []
        put_back = closed = 0
        # Called for no sessions too: a worker that owns nothing is then forgotten.
        for part in list(_parts(list(sessions), 16)) or [[]]:
            raws, back, ended = self._run("take", self.worker, old, why, room - len(rows), *part)
            rows += [Row.parse(raw) for raw in raws]
            put_back, closed = put_back + back, closed + ended
        return Taken(rows, put_back, closed)

    def commit(self, commits: Sequence[Commit]) -> list[str]:
        """Commit many sessions; for each `ok`, `applied`, `lost`, `full` or `refused`."""
        results: list[str] = []
        for batch in _batches(commits):
            args = [arg for commit in batch for arg in commit.args()]
            results += [raw.decode() for raw in self._run("commit", self.worker, *args)]
        return results

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

    def fences(self, sessions: Sequence[str]) -> list[tuple[str, str, bytes, EntryId] | None]:
        """Status, owner, epoch and done of each session's row; None where there is none."""
        answers = self.line.calls(
            [("HMGET", self.keys.row(s), "status", "owner", "epoch", "done") for s in sessions]
        )
        found: list[tuple[str, str, bytes, EntryId] | None] = []
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            status, owner, epoch, done = answer
            found.append(
                None
                if done is None
                else (status.decode(), owner.decode(), epoch, EntryId.parse(done))
            )
        return found

    def _run(self, name: str, *args: Arg) -> Any:
        return self.line.script(script(name), [self.keys.control], [*self._common, *args])


def _parts(items: list[bytes], size: int) -> Iterator[list[bytes]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _batches(commits: Sequence[Commit]) -> Iterator[list[Commit]]:
    """Commits in calls that are few enough, and small enough, not to hold Redis for long."""
    batch: list[Commit] = []
    nbytes = 0
    for commit in commits:
        size = commit.nbytes
        if batch and (len(batch) == SESSIONS_A_CALL or nbytes + size > BYTES_A_CALL):
            yield batch
            batch, nbytes = [], 0
        batch.append(commit)
        nbytes += size
    if batch:
        yield batch
