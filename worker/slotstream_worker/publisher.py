"""What goes to Redis, and when: answers at once, checkpoints as they fall due.

A commit of a session holds all of its answers, so a checkpoint beside them is the state after
the last one; the row on the device is exactly that until the round under way is collected.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from slotstream.ids import EntryId
from slotstream_worker.config import WorkerConfig
from slotstream_worker.host import Host
from slotstream_worker.hosted import Hosted
from slotstream_worker.metrics import Metrics
from slotstream_worker.store.partition import Partition
from slotstream_worker.store.table import Checkpoint, Commit

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
        self._unanswered: list[tuple[Hosted, Commit]] = []
        self._dirty: dict[str, tuple[float, Hosted]] = {}  # moved since; the oldest first
        self._full: dict[str, Hosted] = {}
        self._full_checked = 0.0

    @property
    def waits(self) -> bool:
        """Whether something can be published now."""
        return bool(self._unanswered) or any(
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

    def publish(self, partition: Partition, *, everything: bool = False) -> list[Hosted]:
        """Commit all answers, and the checkpoints that are due (or all); returns what is lost.

        A commit whose answer was cut off is sent again as it was, before anything new.
        """
        lost: list[Hosted] = []
        if self._unanswered:
            lost += self._deliver(partition)
        chosen = self._choose(everything=everything)
        if chosen:
            self._unanswered = chosen
            lost += self._deliver(partition)
        return lost

    def built_on(self, hosted: Hosted, done: EntryId) -> bool:
        """Whether `done` is what this worker has written, or may have written."""
        return done == hosted.base or any(
            h is hosted and commit.answers and commit.answers[-1].id == done
            for h, commit in self._unanswered
        )

    def next_due_s(self) -> float:
        """Seconds until the next checkpoint is due."""
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

    def _choose(self, *, everything: bool) -> list[tuple[Hosted, Commit]]:
        chosen = {h.session: h for h in self._acting.values() if _acts(h)}
        saved = self._checkpoints(self._due(everything=everything), everything=everything)
        chosen.update((hosted.session, hosted) for hosted, _ in saved.values())
        return [
            (hosted, self._commit(hosted, saved.get(hosted.session, (hosted, None))[1]))
            for hosted in chosen.values()
        ]

    def _due(self, *, everything: bool) -> list[Hosted]:
        """Sessions whose checkpoint is due, the oldest first; those handed back always are."""
        before = time.monotonic() - (0.0 if everything else self.config.checkpoint_interval_s)
        due: dict[str, Hosted] = {}
        for session, (since, hosted) in list(self._dirty.items()):
            if self.host.hosted.get(session) is not hosted:
                del self._dirty[session]
            elif since > before:
                break
            else:
                due[session] = hosted
        due.update(
            (s, h)
            for s, h in self._acting.items()
            if h.action == "handback" and not h.in_flight and (h.answers or s in self._dirty)
        )
        return [h for h in due.values() if h.settled and h.action != "end"]

    def _checkpoints(
        self, due: list[Hosted], *, everything: bool
    ) -> dict[str, tuple[Hosted, Checkpoint]]:
        """States of the sessions whose turn it is, within the budget of bytes a second."""
        if not due:
            return {}
        size = max(self.host.engine.pool.slot_bytes, 1)
        within = len(due) if everything else self._allowance.rows(size)
        due = due[:within] + [h for h in due[within:] if h.action == "handback"]
        self._allowance.spend(size * len(due))
        states = self.host.rows.read([h.session for h in due])
        model = self.host.engine.model
        return {
            h.session: (h, Checkpoint(state, model.spec.layout, model.weights))
            for h, state in zip(due, states, strict=True)
        }

    def _commit(self, hosted: Hosted, checkpoint: Checkpoint | None) -> Commit:
        acts = bool(hosted.action) and not hosted.in_flight
        return Commit(
            hosted.session,
            hosted.epoch,
            hosted.cuts,
            hosted.base,
            tuple(hosted.answers),
            checkpoint,
            hosted.action if acts else "",
            hosted.reason if acts else "",
            hosted.mark if acts else "",
        )

    def _deliver(self, partition: Partition) -> list[Hosted]:
        """Send what is chosen; on an error it stays chosen, and goes out again as it is."""
        sent = self._unanswered
        results = partition.table.commit([commit for _, commit in sent])
        self._unanswered = []
        return self._settle(partition, sent, results)

    def _settle(
        self, partition: Partition, sent: Sequence[tuple[Hosted, Commit]], results: list[str]
    ) -> list[Hosted]:
        lost, over = [], []
        replies = errors = 0
        for (hosted, commit), result in zip(sent, results, strict=True):
            if self.host.hosted.get(hosted.session) is not hosted:
                continue
            if result == "lost":
                # An end or a hand-back that was carried out, its answer cut off, looks the same.
                lost.append(hosted)
                continue
            if result == "busy":  # an entry has come: it is not idle any more
                hosted.action = hosted.reason = ""
                partition.inbox.changed.add(hosted.session)
                self._acting.pop(hosted.session, None)
                continue
            if result == "refused":
                hosted.answers.clear()
                hosted.action, hosted.reason, hosted.mark = "end", "reply_conflict", ""
                continue
            if commit.answers:
                del hosted.answers[: len(commit.answers)]
                hosted.base = commit.answers[-1].id
                replies += len(commit.answers)
                errors += sum(answer.is_error for answer in commit.answers)
            if commit.action:
                over.append(hosted)
            elif commit.checkpoint:
                self._dirty.pop(hosted.session, None)
                self.metrics.checkpoints.inc()
                self.metrics.checkpoint_bytes.inc(len(commit.checkpoint.state))
            elif commit.answers:
                self.moved(hosted)
            if not hosted.answers and not hosted.action:
                self._acting.pop(hosted.session, None)
            if result == "full":
                hosted.paused = True
                self._full[hosted.session] = hosted
        self.metrics.replies.inc(replies)
        self.metrics.errors.inc(errors)
        self.host.drop(over)
        for since, _ in self._dirty.values():
            self.metrics.oldest.set(time.monotonic() - since)
            break
        else:
            self.metrics.oldest.set(0.0)
        return lost


def _acts(hosted: Hosted) -> bool:
    """Whether there is something to commit of the session now."""
    return bool(hosted.answers) or (bool(hosted.action) and not hosted.in_flight)
