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
from typing import cast

from redis.exceptions import NoScriptError

from slotstream.lines import Line
from slotstream_worker.config import WorkerConfig
from slotstream_worker.host import Host
from slotstream_worker.hosted import Hosted
from slotstream_worker.metrics import Metrics
from slotstream_worker.store.commits import Answer, Batch, Checkpoint, Commit, Output, raw_id
from slotstream_worker.store.partition import Partition

_FULL_CHECK_S = 0.05


class Allowance:
    """Bytes of state that may go to Redis now: so many a second, a second's worth saved up."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = self._left = bytes_per_s
        self._at = time.monotonic()

    def rows(self, size: int) -> int:
        """How many rows of `size` bytes may go now; at least one a second, whatever its size."""
        now = time.monotonic()
        self._left = min(self._left + self._rate * (now - self._at), max(self._rate, size))
        self._at = now
        return max(int(self._left // size), 0)

    def spend(self, nbytes: int) -> None:
        """Note what has been sent."""
        self._left -= nbytes


@dataclass
class Sent:
    """One call of a wave: its batch, and of each commit the session, answers, and what is more."""

    batch: Batch
    commits: list[tuple[Hosted, list[Output | Answer], Commit | None]] = field(default_factory=list)


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
        self._partition, self._allowance = partition, allowance
        self._wave: deque[Sent] = deque()  # their answers have not come; the oldest first
        self._again: list[Sent] = []  # of the wave: Redis did not know the script
        self._line: Line | None = None  # what the wave went out on
        self._dirty: dict[str, tuple[float, Hosted]] = {}  # moved since; the oldest first
        self._full: dict[str, Hosted] = {}
        self._full_checked = 0.0

    @property
    def in_doubt(self) -> bool:
        """Whether a wave is on its way, or was when its connection broke."""
        return bool(self._wave or self._again)

    @property
    def waits(self) -> bool:
        """Whether something can be published now."""
        return not self.in_doubt and any(
            _acts(h) for h in self.host.acting(self._partition).values()
        )

    @property
    def _acting(self) -> dict[str, Hosted]:
        return self.host.acting(self._partition)

    def moved(self, hosted: Hosted) -> None:
        """The session's state is ahead of its checkpoint from now on, if it was not before."""
        known = self._dirty.get(hosted.session)
        if known is None or known[1] is not hosted:
            self._dirty.pop(hosted.session, None)  # so that the oldest stay first
            self._dirty[hosted.session] = (time.monotonic(), hosted)

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
        if self._compose(everything=False):
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
        if self.host.residents.changing(self._partition):
            return 0.001
        if self._full:
            return _FULL_CHECK_S
        for since, _ in self._dirty.values():
            return max(since + self.config.checkpoint_interval_s - time.monotonic(), 0.001)
        return self.config.sweep_s

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
        saved = self._checkpoints(self._due(everything=everything), everything=everything)
        acting = self._acting
        waves: dict[str, Sent] = {}  # the call that is being filled, by the version of its outputs
        for hosted in (*acting.values(), *(h for h in saved if h.session not in acting)):
            answers = hosted.answers
            sent = waves.get(hosted.weights)
            if sent is None:
                sent = waves[hosted.weights] = Sent(Batch(hosted.weights))
            if answers and hosted.usual and not hosted.action and hosted not in saved:
                fence = (hosted.session, hosted.epoch, hosted.cuts, hosted.base)
                sent.batch.add_outputs(*fence, cast("list[Output]", answers))
                sent.commits.append((hosted, answers, None))
            elif _acts(hosted) or hosted in saved:
                commit = self._commit(hosted, saved.get(hosted))
                sent.batch.add(commit)
                sent.commits.append((hosted, answers, commit))
                if hosted in saved:
                    self.host.changed_weights(hosted, saved[hosted].weights)
            else:
                continue
            hosted.answers, hosted.usual = [], True
            if sent.batch.full:
                self._wave.append(sent)
                del waves[sent.batch.weights]
        self._wave.extend(sent for sent in waves.values() if sent.commits)
        for hosted in [h for h in acting.values() if not h.action]:
            del acting[hosted.session]
        return bool(self._wave)

    def _due(self, *, everything: bool) -> list[Hosted]:
        """Sessions whose checkpoint is due, the oldest first; those handed back always are."""
        before = time.monotonic() - (0.0 if everything else self.config.checkpoint_interval_s)
        due: dict[str, Hosted] = {}
        gone = []
        for session, (since, hosted) in self._dirty.items():
            if hosted.gone:
                gone.append(session)
            elif since > before:
                break
            else:
                due[session] = hosted
        for session in gone:
            del self._dirty[session]
        due.update(
            (s, h)
            for s, h in self._acting.items()
            if h.action == "handback" and not h.in_flight and (h.answers or s in self._dirty)
        )
        # Those that wait to change to another version run nothing until they have: they come first.
        first = dict.fromkeys(self.host.residents.may_change(self._partition))
        first.update((h, None) for h in due.values() if h.settled and h.action != "end")
        return list(first)

    def _checkpoints(self, due: list[Hosted], *, everything: bool) -> dict[Hosted, Checkpoint]:
        """States of the sessions whose turn it is, within the budget of bytes a second."""
        if not due:
            return {}
        size = max(self.host.engine.pool.slot_bytes, 1)
        within = len(due) if everything else self._allowance.rows(size)
        due = due[:within] + [h for h in due[within:] if h.action == "handback"]
        self._allowance.spend(size * len(due))
        states = self.host.rows.read([h.session for h in due])
        layout, residents = self.host.engine.model.spec.layout, self.host.residents
        return {
            h: Checkpoint(b"" if residents.rests(h) else state, layout, residents.next_of(h))
            for h, state in zip(due, states, strict=True)
        }

    def _commit(self, hosted: Hosted, checkpoint: Checkpoint | None) -> Commit:
        acts = bool(hosted.action) and not hosted.in_flight
        return Commit(
            hosted.session,
            hosted.epoch,
            hosted.cuts,
            hosted.base,
            [
                answer
                if isinstance(answer, Answer)
                else self.host.writer.usual(*answer, hosted.weights)
                for answer in hosted.answers
            ],
            checkpoint,
            hosted.action if acts else "",
            hosted.reason if acts else "",
            hosted.mark if acts else "",
        )

    # What became of it

    def _settle(self, partition: Partition, sent: Sent, unusual: dict[int, str]) -> list[Hosted]:
        lost: list[Hosted] = []
        over: list[Hosted] = []
        replies = errors = 0
        for k, (hosted, answers, commit) in enumerate(sent.commits):
            if hosted.gone:
                continue
            if k in unusual and self._refused(partition, hosted, unusual[k], lost):
                continue
            if answers:
                hosted.base = _last_id(answers)
                replies += len(answers)
            if commit is None:
                self.moved(hosted)
                continue
            errors += sum(answer.is_error for answer in commit.answers)
            if commit.action:
                over.append(hosted)
            elif commit.checkpoint:
                self._dirty.pop(hosted.session, None)
                self.metrics.checkpoints.inc()
                self.metrics.checkpoint_bytes.inc(len(commit.checkpoint.state))
            elif answers:
                self.moved(hosted)
        self.metrics.replies.inc(replies)
        self.metrics.errors.inc(errors)
        self.host.drop(over)
        for since, _ in self._dirty.values():
            self.metrics.oldest.set(time.monotonic() - since)
            break
        else:
            self.metrics.oldest.set(0.0)
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


def _last_id(answers: Sequence[Output | Answer]) -> bytes:
    last = answers[-1]
    return raw_id(last.id) if isinstance(last, Answer) else last[0]
