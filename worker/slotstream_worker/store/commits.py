"""Commits as the script takes them: many sessions a call, the usual ones in as little as can be.

The usual commit of a session is outputs and nothing else. Those with errors, operations, a
checkpoint or an action are the others, and say more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from slotstream.ids import EntryId
from slotstream.lines import Arg

SESSIONS_A_CALL = 128
BYTES_A_CALL = 256 * 1024
"""A script holds Redis while it runs; these keep one to about a millisecond."""

Id = bytes | EntryId
Output = tuple[bytes, bytes]
"""A reply that holds an output: the id of the entry it answers, and the encoded output."""


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

    def outputs(self, weights: str) -> list[Output]:
        """Its answers where they are outputs of `weights` and it is nothing else; else none."""
        if self.checkpoint or self.action:
            return []
        found: list[Output] = []
        for answer in self.answers:
            fields = answer.fields
            if len(fields) != 4 or (fields[0], *fields[2:]) != ("output", "weights", weights):
                return []
            if not answer.effect:
                return []
            output = fields[1]
            found.append((raw_id(answer.id), output if isinstance(output, bytes) else
                          output.encode()))  # fmt: skip
        return found

    def args(self) -> Iterator[Arg]:
        """What the script is told after the fence and the base."""
        yield from (0, self.action, self.reason, self.mark, 1 if self.checkpoint else 0)
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


class Batch:
    """Commits of one call of the script.

    Args:
        weights: the version that all of its outputs were made with.
    """

    def __init__(self, weights: str) -> None:
        self.weights = weights
        self.args: list[Arg] = []
        self.sessions: list[str] = []
        self._nbytes = 0

    @property
    def full(self) -> bool:
        """Whether another session's commit belongs in another call."""
        return len(self.sessions) >= SESSIONS_A_CALL or self._nbytes >= BYTES_A_CALL

    def add_outputs(
        self, session: str, epoch: bytes, cuts: bytes, base: bytes, outputs: Sequence[Output]
    ) -> None:
        """Add a session's usual commit: outputs, at least one."""
        self.sessions.append(session)
        self.args += (session, epoch, cuts, base, len(outputs))
        self.args += chain.from_iterable(outputs)
        self._nbytes += len(outputs) * len(outputs[0][1])

    def add(self, commit: Commit) -> None:
        """Add any commit."""
        fence = (commit.session, commit.epoch, commit.cuts, raw_id(commit.base))
        if outputs := commit.outputs(self.weights):
            self.add_outputs(*fence, outputs)
            return
        self.sessions.append(commit.session)
        self.args += (*fence, *commit.args())
        self._nbytes += commit.nbytes

    def results(self, answer: Sequence[Any]) -> dict[int, str]:
        """What became of the commits that are not simply `ok`, by their place in the batch."""
        return {int(k) - 1: result.decode() for k, result in zip(answer[::2], answer[1::2],
                                                                 strict=True)}  # fmt: skip


def raw_id(id: Id) -> bytes:  # noqa: A002 (the field's own name)
    """An id as Redis writes it."""
    return id if isinstance(id, bytes) else str(id).encode()
