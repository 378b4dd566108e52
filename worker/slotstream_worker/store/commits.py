"""Commits as the script takes them: many sessions a call, the usual ones in as little as can be.

The usual commit of a session is outputs, and perhaps a checkpoint, of one version of the weights.
Those with errors, operations or an action are the others, and say more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slotstream.arguments import Arg, Arguments, argument
from slotstream.ids import EntryId

SESSIONS_A_CALL = 128
REPLIES_A_CALL = 256
BYTES_A_CALL = 256 * 1024
"""A script holds Redis while it runs; these keep one to about a millisecond."""

Id = bytes | EntryId
Outputs = tuple[Sequence[bytes], bytes]
"""Replies that hold an output each: ids of the entries they answer, all of one length, and of each
in turn this id and the encoded output as arguments of a command, packed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply: the id of the entry it answers, and its fields in the order they are sent.

    `effect` is False where the entry left the session's state as it was.
    """

    id: Id
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
    base: Id
    answers: Sequence[Answer] = ()
    checkpoint: Checkpoint | None = None
    action: str = ""
    reason: str = ""
    mark: str = ""

    def usual(self, weights: str, layout: str) -> list[Outputs] | None:
        """Its answers where it is nothing else than outputs of `weights`, and perhaps a checkpoint.

        None where it is more, or is nothing.
        """
        saved = self.checkpoint
        if self.action or not (self.answers or saved):
            return None
        if saved and (saved.weights, saved.layout) != (weights, layout):
            return None
        found: list[Outputs] = []
        for answer in self.answers:
            fields = answer.fields
            if len(fields) != 4 or (fields[0], *fields[2:]) != ("output", "weights", weights):
                return None
            if not answer.effect:
                return None
            output = fields[1]
            raw = output if isinstance(output, bytes) else output.encode()
            id_ = raw_id(answer.id)
            found.append(((id_,), argument(id_) + argument(raw)))
        return found

    def args(self) -> Iterator[Arg]:
        """What the script is told after the fence and the base."""
        yield from (self.action, self.reason, self.mark, 1 if self.checkpoint else 0)
        if self.checkpoint:
            yield from (self.checkpoint.state, self.checkpoint.layout, self.checkpoint.weights)
        yield len(self.answers)
        for answer in self.answers:
            yield from (
                raw_id(answer.id),
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


_BASE_AND_COUNT = b"$%d\r\n%b\r\n" * 2
_FENCE_ARGS, _USUAL_ARGS = 3, 5


def fence(session: str, epoch: bytes, cuts: bytes) -> bytes:
    """What a commit of a session begins with, packed; the same for as long as it is held."""
    return argument(session.encode()) + argument(epoch) + argument(cuts)


class Batch:
    """Commits of one call of the script.

    Args:
        weights: the version that all of its outputs were made with.
        layout: of the usual checkpoints.
    """

    def __init__(self, weights: str, layout: str = "") -> None:
        self.weights, self.layout = weights, layout
        self.args = Arguments()
        self.sessions: list[str] = []
        self.replies = 0
        """How many replies it holds."""
        self._nbytes = 0

    @property
    def full(self) -> bool:
        """Whether another session's commit belongs in another call."""
        return (
            len(self.sessions) >= SESSIONS_A_CALL
            or self.replies >= REPLIES_A_CALL
            or self._nbytes >= BYTES_A_CALL
        )

    def add_usual(
        self,
        session: str,
        fence: bytes,
        base: bytes,
        outputs: Sequence[Outputs],
        state: bytes | None = None,
    ) -> None:
        """Add a session's usual commit: outputs, and perhaps the state after the last of them.

        Args:
            session: the session.
            fence: its `fence`: under which epoch it is owned, how many entries were cancelled.
            base: id of the last entry that Redis holds the answer of.
            outputs: of the entries after that one; none only where there is a state.
            state: a checkpoint of the batch's own weights and layout.
        """
        self.sessions.append(session)
        replies, packed = 0, []
        for ids, some in outputs:
            replies += len(ids)
            self._nbytes += len(some)
            packed.append(some)
        count = b"%d" % replies if state is None else b"+%d" % replies
        args = self.args
        args.parts += (fence, _BASE_AND_COUNT % (len(base), base, len(count), count), *packed)
        args.count += _USUAL_ARGS + 2 * replies
        self.replies += replies
        if state is not None:
            self.args.add(state)
            self._nbytes += len(state)

    def add(self, commit: Commit) -> None:
        """Add any commit."""
        session, saved = commit.session, commit.checkpoint
        fenced, base = fence(session, commit.epoch, commit.cuts), raw_id(commit.base)
        outputs = commit.usual(self.weights, self.layout)
        if outputs is not None:
            self.add_usual(session, fenced, base, outputs, saved.state if saved else None)
            return
        self.sessions.append(session)
        self.args.parts.append(fenced)
        self.args.count += _FENCE_ARGS
        self.args.add(base, "*", *commit.args())
        self._nbytes += commit.nbytes
        self.replies += len(commit.answers)

    def results(self, answer: Sequence[Any]) -> dict[int, str]:
        """What became of the commits that are not simply `ok`, by their place in the batch."""
        return {int(k) - 1: result.decode() for k, result in zip(answer[::2], answer[1::2],
                                                                 strict=True)}  # fmt: skip


def raw_id(id: Id) -> bytes:  # noqa: A002 (the field's own name)
    """An id as Redis writes it."""
    return id if isinstance(id, bytes) else str(id).encode()
