"""What goes to Redis, and when: answers at once, checkpoints as they fall due.

A commit of a session holds all of its answers, so a checkpoint beside them is the state after
the last one; the row on the device is exactly that until the round under way is collected.

One wave of commits is on its way at a time. While Redis works on it rounds go on, and the next
wave holds what they answered: the slower Redis is, the fewer commits there are a reply.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import NoScriptError

from slotstream.lines import Line
from slotstream_worker.checkpoints import Allowance, Checkpoints, Saved
from slotstream_worker.config import WorkerConfig
from slotstream_worker.host import Host
from slotstream_worker.hosted import Hosted
from slotstream_worker.metrics import Metrics
from slotstream_worker.store.commits import (
    Answer,
    Batch,
    Checkpoint,
    Commit,
    Outputs,
    raw_id,
)
from slotstream_worker.store.partition import Partition

_FULL_CHECK_S = 0.05


Part = tuple[Hosted, list[Outputs | Answer], Checkpoint | None, Commit | None]
"""What a call writes of one session: its answers, its checkpoint, and the commit of both where it
is not the usual."""


@dataclass
class Sent:
    """One call of a wave: its batch, and what it writes of each session in turn."""

    batch: Batch
    parts: list[Part] = field(default_factory=list)


class Publisher:
    """Publishes the answers and checkpoints of one partition's sessions."""

    def __init__(
        self,
        config: WorkerConfig,
        host: Host,
        metrics: Metrics,
        partition: int,
        allowance: Allowance,
    ) -> None:
        self.config, self.host, self.metrics = config, host, metrics
        self.checkpoints = Checkpoints(config, host, partition, allowance)
        self._partition, self._layout = partition, host.engine.model.spec.layout
        self._wave: deque[Sent] = deque()  # their answers have not come; the oldest first
        self._again: list[Sent] = []  # of the wave: Redis did not know the script
        self.published = 0
        """Replies that Redis has taken."""
        self._line: Line | None = None  # what the wave went out on
        self._full: dict[str, Hosted] = {}
        self._full_checked = 0.0

    @property
    def in_doubt(self) -> bool:
        """Whether a wave is on its way, or was when its connection broke."""
        return bool(self._wave or self._again)

    @property
    def waits(self) -> bool:
        """Whether something can be published now."""
        if self.in_doubt:
            return False
        held = self.checkpoints.held
        return self.checkpoints.came or any(
            _acts(h) and h not in held for h in self._acting.values()
        )

    @property
    def _acting(self) -> dict[str, Hosted]:
        return self.host.acting(self._partition)

    # A wave

    def publish(self, partition: Partition) -> None:
        """Send all answers, and the checkpoints that are due, unless a wave is on its way.

        A wave whose connection broke is sent again as it was, before anything new.
        """
        if self.in_doubt:
            if self._line is not partition.commits:
                self._wave.extendleft(reversed(self._again))
                self._again.clear()
                self._send(partition)
            return
        if (self._acting or self.checkpoints.due) and self._compose(everything=False):
            self._send(partition)

    def take_answers(
        self, partition: Partition, *, wait: bool = False, readable: bool = False
    ) -> list[Hosted]:
        """Take in what Redis answered to the wave; returns the sessions that are lost.

        Args:
            partition: where it went.
            wait: wait for the whole wave.
            readable: the connection is known to have something to read.
        """
        lost: list[Hosted] = []
        line = self._line
        if line is not partition.commits:
            return lost
        while self._wave and (wait or line.ready(readable=readable)):
            readable = False
            try:
                answer = line.receive()
            except NoScriptError:
                self._again.append(self._wave.popleft())
            else:
                sent = self._wave.popleft()
                lost += self._settle(partition, sent, sent.batch.results(answer))
            if not self._wave and self._again:
                self._wave.extend(self._again)
                self._again.clear()
                for sent in self._wave:
                    partition.table.send_commits(sent.batch, line, whole=True)
        return lost

    def flush(self, partition: Partition) -> list[Hosted]:
        """Write everything now, each checkpoint due or not, and wait; returns what is lost."""
        self.publish(partition)
        lost = self.take_answers(partition, wait=True)
        if self._compose(everything=True):
            self._send(partition)
            lost += self.take_answers(partition, wait=True)
        return lost

    def next_due_s(self) -> float:
        """Seconds until the next checkpoint is due."""
        due_s = self.checkpoints.next_due_s
        return min(due_s, _FULL_CHECK_S) if self._full else due_s

    def caught_up(self, partition: Partition) -> list[Hosted]:
        """Sessions that waited for their reader and need not any more."""
        now = time.monotonic()
        if not self._full or now - self._full_checked < _FULL_CHECK_S:
            return []
        self._full_checked = now
        names = list(self._full)
        lengths = partition.line.calls([("XLEN", partition.keys.outbox(s)) for s in names])
        free = [
            self._full[s]
            for s, length in zip(names, lengths, strict=True)
            if not isinstance(length, Exception) and length < self.config.reply_retention
        ]
        for hosted in free:
            del self._full[hosted.session]
        return free

    def _send(self, partition: Partition) -> None:
        self._line = partition.commits
        for sent in self._wave:
            partition.table.send_commits(sent.batch, self._line)

    # What it is made of

    def _compose(self, *, everything: bool) -> bool:
        """Make a wave of what is to be written; whether there is anything."""
        acting = self._acting
        saved = self.checkpoints.take(acting, everything=everything)
        held = self.checkpoints.held
        calls: dict[str, Sent] = {}  # the call that is being filled, by the version of its outputs
        rest: dict[str, Hosted] = {}  # of those that act, what is not all in this wave
        for hosted in (*acting.values(), *(h for h in saved if h.session not in acting)):
            if hosted in held:
                rest[hosted.session] = hosted
                continue
            point = saved.get(hosted) if saved else None
            if point or hosted.answers or _acts(hosted):
                sent = calls.get(hosted.weights)
                if sent is None:
                    sent = calls[hosted.weights] = Sent(Batch(hosted.weights, self._layout))
                self._add(sent, hosted, point)
                if sent.batch.full:
                    self._wave.append(sent)
                    del calls[sent.batch.weights]
            if hosted.answers or hosted.action:
                rest[hosted.session] = hosted
        self._wave.extend(calls.values())
        acting.clear()
        acting.update(rest)
        return bool(self._wave)

    def _add(self, sent: Sent, hosted: Hosted, point: Saved | None) -> None:
        """Add what is to be written of a session: its answers, up to its checkpoint if it has one.

        An action comes with all of them.
        """
        answers: list[Any] = hosted.answers
        hosted.answers = []
        usual = hosted.usual and not hosted.action
        if usual and point is None:
            sent.batch.add_usual(hosted.session, hosted.fence, hosted.base, answers)
            sent.parts.append((hosted, answers, None, None))
            return
        checkpoint, commit = point.checkpoint if point else None, None
        if point and point.answers < len(answers):
            answers, hosted.answers = answers[: point.answers], answers[point.answers :]
        if usual and checkpoint and checkpoint.weights == hosted.weights:
            state = checkpoint.state
            sent.batch.add_usual(hosted.session, hosted.fence, hosted.base, answers, state)
        else:
            commit = self._commit(hosted, answers, checkpoint)
            sent.batch.add(commit)
        sent.parts.append((hosted, answers, checkpoint, commit))
        hosted.usual = hosted.usual or not hosted.answers
        if checkpoint:
            self.host.changed_weights(hosted, checkpoint.weights)

    def _commit(
        self, hosted: Hosted, answers: list[Outputs | Answer], checkpoint: Checkpoint | None
    ) -> Commit:
        acts = bool(hosted.action) and not hosted.in_flight
        return Commit(
            hosted.session,
            hosted.epoch,
            hosted.cuts,
            hosted.base,
            self.host.writer.answers(answers, hosted.weights),
            checkpoint,
            hosted.action if acts else "",
            hosted.reason if acts else "",
            hosted.mark if acts else "",
        )

    # What became of it

    def _settle(self, partition: Partition, sent: Sent, unusual: dict[int, str]) -> list[Hosted]:
        lost: list[Hosted] = []
        over: list[Hosted] = []
        replies, errors, saved, saved_bytes = sent.batch.replies, 0, 0, 0
        moved = self.checkpoints.moved
        for k, (hosted, answers, checkpoint, commit) in enumerate(sent.parts):
            if hosted.gone or (k in unusual and self._refused(partition, hosted, unusual[k], lost)):
                replies -= _count(answers)
                continue
            if answers:
                hosted.base = _last_id(answers)
            if commit:
                errors += sum(answer.is_error for answer in commit.answers)
                if commit.action:
                    over.append(hosted)
                    continue
            if checkpoint:
                self.checkpoints.written(hosted)
                saved += 1
                saved_bytes += len(checkpoint.state)
            elif answers:
                moved(hosted)
        self.published += replies
        self.metrics.replies.inc(replies)
        self.metrics.errors.inc(errors)
        self.metrics.checkpoints.inc(saved)
        self.metrics.checkpoint_bytes.inc(saved_bytes)
        self.host.drop(over)
        self.metrics.oldest.set(self.checkpoints.oldest_s)
        return lost

    def _refused(
        self, partition: Partition, hosted: Hosted, result: str, lost: list[Hosted]
    ) -> bool:
        """Note what is not simply `ok`; whether nothing was written."""
        if result == "lost":
            # An end or a hand-back that was carried out, its answer cut off, looks the same.
            lost.append(hosted)
        elif result == "busy":  # an entry has come: it is not idle any more
            hosted.action = hosted.reason = ""
            hosted.read_to = hosted.base  # what came meanwhile was left out
            self.host.changed(partition.keys.partition, [hosted.session])
            if not hosted.answers:
                self._acting.pop(hosted.session, None)
        elif result == "refused":
            hosted.answers.clear()
            hosted.action, hosted.reason, hosted.mark = "end", "reply_conflict", ""
            self._acting[hosted.session] = hosted
        else:
            if result == "full":
                hosted.paused = True
                self._full[hosted.session] = hosted
            return False
        return True


def _acts(hosted: Hosted) -> bool:
    """Whether there is something to commit of the session now."""
    return bool(hosted.answers) or (bool(hosted.action) and not hosted.in_flight)


def _count(answers: Sequence[Outputs | Answer]) -> int:
    """How many replies the answers are."""
    return sum(1 if isinstance(one, Answer) else len(one[0]) for one in answers)


def _last_id(answers: Sequence[Outputs | Answer]) -> bytes:
    last = answers[-1]
    return raw_id(last.id) if isinstance(last, Answer) else last[0][-1]
