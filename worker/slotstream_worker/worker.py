"""The worker's loop: poll, admit, form a round, launch, commit.

While the device runs one round, the answers of the round before are published and the frames
of the next are read. What Redis holds is the truth; everything here can be built from it.

    worker = Worker(config, model)
    worker.prepare()            # measure, compile, agree with the app's other workers
    while not stop:
        worker.turn()
    worker.drain()
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from slotstream_worker.agreement import agree
from slotstream_worker.config import WorkerConfig
from slotstream_worker.engine.engine import Engine
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.host import Flying, Host, Hosted
from slotstream_worker.metrics import Metrics
from slotstream_worker.publisher import Publisher
from slotstream_worker.store.partition import Partition
from slotstream_worker.store.table import Row

log = logging.getLogger(__name__)

_LONGEST_SLEEP_S = 0.25
"""Signals are looked at between turns, so no sleep is longer."""


class Displaced(RuntimeError):
    """Another process of this worker's own name has taken its sessions."""


class Worker:
    """One worker. Construction opens nothing; `prepare` does."""

    def __init__(self, config: WorkerConfig, model: StreamModel) -> None:
        self.config, self.model = config, model
        self.metrics = Metrics()
        self.partition = Partition(config)
        self.engine = Engine(model, config.slots)
        self.host = Host(self.engine, max_frame_bytes=config.max_frame_bytes, finite=config.finite)
        self.publisher = Publisher(config, self.host, self.metrics)
        self._flying: Flying | None = None
        self._connected_at = 0.0
        self._swept_at = 0.0
        self._judged_at = 0.0

    def prepare(self, progress: Callable[[int], None] = lambda _count: None) -> None:
        """Connect, agree on the row counts, compile; nothing is owned before it is done.

        Raises:
            Disagreement: the app is configured for another model, or another machine's bits.
            CannotStream: the model mixes its rows.
        """
        self.partition.connect()
        self.partition.lease.start()
        exact = agree(self.partition.line, self.config, self.engine, self.partition, progress)
        self.metrics.inexact.set(0 if exact else 1)
        self._connected_at = time.monotonic()
        if self.config.name:
            self._take_older_selves()

    def connect(self) -> None:
        """Open the connections anew, and compare what is held with what Redis says."""
        self.partition.connect()
        self.metrics.reconnects.inc()
        self._connected_at = time.monotonic()
        self.sweep()

    def turn(self) -> None:
        """One turn of the loop. Raises `redis.RedisError` where Redis cannot be reached.

        A turn that raised may be repeated after `connect`: nothing that was computed is lost.
        """
        self.partition.lease.beat()
        self.collect()  # the round of a turn that raised
        if formed := self.host.form():
            self._flying = self.host.launch(formed)
        self._publish()
        self._poll(busy=bool(formed))
        self.collect()

    def collect(self) -> None:
        """Wait for the round under way, if there is one."""
        if self._flying is None:
            return
        flying, self._flying = self._flying, None
        frames = self.host.collect(flying)
        self.metrics.rounds.inc()
        self.metrics.frames.inc(frames)
        self.metrics.round_rows.observe(frames)

    def drain(self) -> None:
        """Claim no more, finish the round, checkpoint, hand every session back, end the lease."""
        self.collect()
        for hosted in self.host.hosted.values():
            self.host.finish(hosted, "handback")
        while self.host.hosted:
            lost = self.publisher.publish(self.partition, everything=True)
            self.host.drop(lost)
        self.partition.lease.release(self.partition.line)
        log.info("drained")

    def sweep(self) -> None:
        """The slow truth: drop what is no longer held, claim anew what is, read every stream."""
        self._swept_at = time.monotonic()
        table = self.partition.table
        sessions = list(self.host.hosted)
        for session, fence in zip(sessions, table.fences(sessions), strict=True):
            hosted = self.host.hosted[session]
            if (
                fence is None
                or fence[1] != self.config.worker
                or fence[2] != hosted.epoch
                or not self.publisher.built_on(hosted, fence[3])
            ):
                self._dropped([hosted], None if fence is None else fence[1])
            elif fence[0] == "closing" and not hosted.mark:
                self.host.finish(hosted, "end", "close")
        owned = table.owned()
        missing = owned - {session.encode() for session in self.host.hosted}
        if missing:
            log.warning("%d sessions are owned but not held; claimed anew", len(missing))
            self._adopt(table.take(missing, self.config.worker, "self", self.host.room).rows)
        inbox = self.partition.inbox
        inbox.changed.update(self.host.hosted)
        inbox.control_changed = inbox.waiting_changed = True
        inbox.check()

    # One turn's parts

    def _publish(self) -> None:
        self._dropped(self.publisher.publish(self.partition))
        self.metrics.sessions.set(len(self.host.hosted))

    def _poll(self, *, busy: bool) -> None:
        """Hear what has changed, and read it; sleeps on the socket when there is nothing to do."""
        inbox = self.partition.inbox
        idle = not (busy or self.publisher.waits or inbox.control_changed or self._backlog())
        if inbox.waiting_changed and self.host.room:
            idle = False
        inbox.listen(self._sleep_s() if idle else 0.0)
        if inbox.control_changed or (inbox.waiting_changed and self.host.room):
            self._admit()
        now = time.monotonic()
        if now - self._swept_at > self.config.sweep_s:
            self.sweep()
        if (
            now - self._judged_at > self.config.lease_s / 4
            and now - self._connected_at > self.config.lease_s
        ):
            self._judged_at = now
            self._take_from_the_dead()
        self._read()

    def _backlog(self) -> bool:
        hosted = self.host.hosted
        return (
            any(s in hosted and not hosted[s].queue for s in self.partition.inbox.changed)
            or self.host.has_work
        )

    def _sleep_s(self) -> float:
        return min(_LONGEST_SLEEP_S, self.publisher.next_due_s())

    def _admit(self) -> None:
        """Apply control messages, then claim what waits while there is room."""
        inbox, table = self.partition.inbox, self.partition.table
        control, waiting = inbox.queues()
        if control:
            _, ignored, _ = table.apply_control()
            self.metrics.ignored.inc(ignored)
            inbox.waiting_changed = True
        elif waiting and self.host.room:
            self._adopt(table.claim(self.host.room))
        self.metrics.waiting.set(waiting)

    def _adopt(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        for row in rows:
            if row.weights and row.weights != self.model.weights:
                log.warning(
                    "session %s ran with weights %s so far, and goes on with %s",
                    row.session,
                    row.weights,
                    self.model.weights,
                )
        adopted = self.host.adopt(rows)
        raws = self.partition.inbox.between(
            {row.session: (row.cursor, row.done) for row in rows if row.cursor < row.done}
        )
        for hosted, row in zip(adopted, rows, strict=True):
            self.host.replay(hosted, row, raws.get(row.session, ()))
            self.metrics.replayed.inc(len(hosted.queue))
            if row.cursor < row.done:
                self.publisher.moved(hosted)
        self.partition.inbox.changed.update(row.session for row in rows)

    def _read(self) -> None:
        """Read the streams that changed, of the sessions whose own queue has run out."""
        inbox, hosted = self.partition.inbox, self.host.hosted
        inbox.changed.intersection_update(hosted)
        ask = {
            s: hosted[s].read_to
            for s in inbox.changed
            if not hosted[s].queue and not hosted[s].held and hosted[s].action != "end"
        }
        if ask:
            for session, raws in inbox.read(ask, self.config.read_ahead).items():
                self.host.feed(session, raws)
        self.host.resume(self.publisher.caught_up(self.partition))

    # Who owns what

    def _dropped(self, lost: Sequence[Hosted], owner: str | None = None) -> None:
        if not lost:
            return
        self.metrics.lost.inc(len(lost))
        self.host.drop(lost)
        if self.config.name:
            fences = self.partition.table.fences([h.session for h in lost])
            for owner in {fence[1] for fence in fences if fence}:
                if owner != self.config.worker and owner.rpartition(".")[0] == self.config.name:
                    raise Displaced(
                        f"{owner}, a newer process of the name {self.config.name}, has "
                        "taken this one's sessions; this one stops"
                    )
        self._swept_at = 0.0  # what is still this worker's own is claimed anew at once

    def _take_older_selves(self) -> None:
        table, own = self.partition.table, self.config.worker
        for worker in table.workers():
            if worker != own and worker.rpartition(".")[0] == self.config.name:
                self._take(worker, "name")

    def _take_from_the_dead(self) -> None:
        table = self.partition.table
        workers = [w for w in table.workers() if w != self.config.worker]
        for worker, alive in zip(workers, table.alive(workers), strict=True):
            if not alive:
                self._take(worker, "dead")

    def _take(self, worker: str, why: str) -> None:
        table = self.partition.table
        sessions = table.owned(worker)
        taken = table.take(sessions, worker, why, self.host.room)
        self._adopt(taken.rows)
        log.info(
            "took %d sessions of %s (%s); %d put back, %d closed",
            len(taken.rows),
            worker,
            why,
            taken.put_back,
            taken.closed,
        )
