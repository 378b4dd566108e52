"""One partition as a worker serves it: what it claims, reads, publishes, takes and hands back.

Everything held here can be built from Redis, so any part may fail at any point: after an outage
`sweep` compares what is held with what Redis says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Sequence

from slotstream.ids import EntryId
from slotstream_worker.config import WorkerConfig
from slotstream_worker.host import Host
from slotstream_worker.hosted import Hosted
from slotstream_worker.judging import Judge
from slotstream_worker.metrics import Metrics
from slotstream_worker.outage import Outage
from slotstream_worker.publisher import Publisher
from slotstream_worker.store.commits import raw_id
from slotstream_worker.store.inbox import Portions, Queues
from slotstream_worker.store.partition import Partition
from slotstream_worker.store.table import Position, Row
from slotstream_worker.sweeping import Sweep

log = logging.getLogger(__name__)

_FRUITLESS_READS, _REST_S = 30, 0.02
_JUDGE_S = 0.5
"""How often others' leases are looked at: the sessions of the dead wait for no more than a second
beyond the lease."""
_SHED_PAUSE_S = 2.0
"""A session that a worker has handed on it does not claim for so long: it is for others."""


class Displaced(RuntimeError):
    """Another process of this worker's own name has taken its sessions."""


class Shard:
    """A partition served by one worker, on a host that it shares with the worker's others."""

    def __init__(
        self,
        config: WorkerConfig,
        partition: Partition,
        host: Host,
        publisher: Publisher,
        metrics: Metrics,
    ) -> None:
        self.config, self.partition, self.host = config, partition, host
        self.publisher, self.metrics = publisher, metrics
        self.number = partition.keys.partition
        self.outage = Outage(f"partition {self.number}")
        self.ordered_to_drain = False
        self._judge = Judge(config.lease_s)
        self._sweep = Sweep(config.sweep_s)
        self._missing = True  # something may be owned that is not held
        self._judged_at = 0.0
        self._rests_until = 0.0
        self._shed_at: dict[str, float] = {}
        self._portions = Portions(config.read_ahead, host.frames.size)
        self._asked: dict[str, Hosted] = {}
        self._fruitless, self._fruitless_since = 0, 0.0

    @property
    def hosted(self) -> dict[str, Hosted]:
        """Sessions of this partition that are held here."""
        return self.host.of(self.number)

    # One turn's parts; each raises where Redis cannot be reached, and may then be repeated

    def receive(self, readable: Container[int] = ()) -> None:
        """Take in what has come: answers to commits, entries, and what has changed.

        Args:
            readable: sockets that are known to have something to read.
        """
        partition = self.partition
        heard, reader, commits = partition.filenos
        if self.publisher.in_doubt and commits in readable:
            self._dropped(self.publisher.take_answers(partition, readable=True))
        inbox = partition.inbox
        if inbox.asking and (reader in readable or inbox.came):
            self._feed()
        if heard in readable:
            inbox.listen(readable=True)
            if inbox.changed:
                self.host.changed(self.number, inbox.changed)
                inbox.changed.clear()

    def send(self) -> None:
        """Ask for entries, publish what has been answered, and do whatever else is due."""
        self._ask()  # first: Redis is at it while the rest is done
        now = time.monotonic()
        # Before anything is sent: a row that our own commit has just changed is no other's.
        if not self.publisher.in_doubt:
            self._compare(self._sweep.part(now))
        self.publish()
        if self._sweep.over(now):
            self._begin_sweep(now)
        if self._missing:
            self._claim_missing()
        if self.partition.inbox.news and not self.rests_s:
            queues = self.partition.inbox.queues()
            self._fruitful(any(queues))
            self._admit(queues)
        self._judge.contact(now)
        if now - self._judged_at > min(self.config.lease_s / 4, _JUDGE_S) and self._judge.sits(now):
            self._judged_at = now
            self._take_from_the_dead(now)
        self._ask()
        self.host.resume(self.publisher.caught_up(self.partition))

    def publish(self) -> None:
        """Publish what has been answered, unless a wave is on its way."""
        self.publisher.publish(self.partition)

    @property
    def rests_s(self) -> float:
        """Seconds until streams are read again, after many reads that found nothing."""
        return max(self._rests_until - time.monotonic(), 0.0)

    @property
    def waits(self) -> bool:
        """Whether `send` has something to do at once."""
        if not self.partition.connected or self.outage.on:
            return False
        if self.publisher.waits:
            return True
        inbox = self.partition.inbox
        if inbox.came or self._missing:
            return True
        if self.rests_s:
            return False
        return inbox.news or bool(self.host.hungry(self.number) and not inbox.asking)

    def connect(self) -> None:
        """Open the connections anew, compare what is held with what Redis says, and write again.

        An outage ends with a write: a Redis that is read-only, or full, is read from as ever.
        """
        self.partition.connect()
        # A Redis that lost its data has forgotten who may own something.
        keys = self.partition.keys
        self.partition.line.call("SADD", keys.workers, self.config.worker)
        self.metrics.reconnects.inc()
        self._judge.connected(time.monotonic())
        self.publisher.publish(self.partition)
        self.sweep()
        # Redis watches for a connection what that one has read.
        self.host.changed(self.number, self.hosted)

    def join(self) -> None:
        """Open the connections; take at once what older processes of this one's name own."""
        self.partition.connect()
        self.partition.refuse_eviction()
        self._judge.joined(time.monotonic())
        if self.config.name:
            for worker in self.partition.table.workers():
                if worker != self.config.worker and self._namesake(worker):
                    self._take(worker, "name")

    def leave(self) -> None:
        """Put back what a claim's lost answer left, and delete the lease: nothing is owned here."""
        keys, worker = self.partition.keys, self.config.worker
        while owned := self.partition.table.owned():
            self.partition.table.take(owned, worker, "leave", 0)
        answers = self.partition.line.calls(
            [
                ("DEL", keys.lease(worker), keys.order(worker)),
                ("SREM", keys.workers, worker),
            ]
        )
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer

    def hand_back(self) -> None:
        """Hand back everything that is held, checkpointed where the state allows."""
        while self.hosted:
            # Each time: an idle session's end is called off where an entry has come meanwhile.
            for hosted in list(self.hosted.values()):
                self.host.finish(hosted, "handback")
            self.host.drop(self.publisher.flush(self.partition))

    def sweep(self) -> None:
        """The slow truth: drop what is no longer held, claim anew what is, read what was missed."""
        # Nothing in doubt first: a row that our own commit has just changed is no other's.
        self._dropped(self.publisher.take_answers(self.partition, wait=True))
        now = time.monotonic()
        self._begin_sweep(now)
        while names := self._sweep.part(now, rest=True):
            self._compare(names)

    def _begin_sweep(self, now: float) -> None:
        """Begin to compare all that is held, and look at what no change may have told of."""
        self._sweep.begin(self.hosted, now)
        self._missing = True
        if self.config.rebalance:
            self._even_out()
        self.partition.inbox.news = True
        self.partition.inbox.check()

    def _claim_missing(self) -> None:
        """Claim anew what is owned and not held."""
        table = self.partition.table
        if table.count_owned() != len(self.hosted):
            missing = table.owned() - {name.encode() for name in self.hosted}
            if missing:
                log.warning("%d sessions are owned but not held; claimed anew", len(missing))
                self._adopt(table.take(missing, self.config.worker, "self", self.host.room).rows)
        self._missing = False

    def _compare(self, names: Sequence[str]) -> None:
        """Compare some of what is held with what Redis says."""
        held = [self.hosted[name] for name in names if name in self.hosted]
        if not held:
            return
        differ, unread = self.partition.table.compare(
            [Position(h.session, h.epoch, h.cuts, h.base, h.read_to) for h in held]
        )
        self.host.changed(self.number, unread)
        lost, gone = [], []
        for one in held:
            fence = differ.get(one.session)
            if one.session not in differ:
                # One whose entries are on their way is not idle.
                coming = one.session in unread or one.session in self._asked
                if not coming and self._idle(one):
                    self.host.finish(one, "end", "idle")
            elif fence is None:
                gone.append(one)
            elif (
                fence.owner != self.config.worker
                or fence.epoch != one.epoch
                or fence.cuts != one.cuts
                or raw_id(fence.done) != one.base
            ):
                lost.append(one)
            elif fence.status == "closing" and not one.mark:
                self.host.finish(one, "end", "close")
        self._forgotten(gone)
        self._dropped(lost)

    def may_run(self, suspect: Hosted) -> bool:
        """Say that a suspect is about to run alone; whether it is still held."""
        if self.partition.table.begin_trial(suspect.session, suspect.epoch, suspect.cuts):
            return True
        self._dropped([suspect])
        return False

    # Sessions come

    def _admit(self, queues: Queues) -> None:
        """Apply control messages, obey an order, then claim what waits while there is room."""
        inbox, table = self.partition.inbox, self.partition.table
        if queues.control:
            _, ignored = table.apply_control(queues.control)
            self.metrics.ignored.inc(ignored)
            inbox.news = True
        if queues.order:
            self._obey(queues.order)
        self.metrics.waiting.labels(self.number).set(len(queues.waiting))
        now = time.monotonic()
        self._shed_at = {s: at for s, at in self._shed_at.items() if now - at < _SHED_PAUSE_S}
        claimable = [session for session in queues.waiting if session not in self._shed_at]
        if claimable and self.host.room:
            self._adopt(table.claim(claimable[: self.host.room], self.host.residents.current))
            inbox.news = True

    def _adopt(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        # Read before anything is taken in: a session without its replay must never run.
        raws = self.partition.inbox.between(
            {row.session: (row.cursor, row.done) for row in rows if row.cursor < row.done}
        )
        for hosted, row in zip(self.host.adopt(self.number, rows), rows, strict=True):
            self.host.replay(hosted, row, raws.get(row.session, ()))
            self.metrics.replayed.inc(len(hosted.queue))
            if row.cursor < row.done:
                self.publisher.checkpoints.moved(hosted)

    def _ask(self) -> None:
        """Ask for entries of the sessions whose own queue runs out, one read at a time."""
        inbox, hungry = self.partition.inbox, self.host.hungry(self.number)
        if not hungry or inbox.asking or self.rests_s:
            return
        if asked := self.host.to_read(self.number, self._portions.streams):
            self._asked = asked
            positions = {name: hosted.read_to for name, hosted in asked.items()}
            inbox.ask(positions, self._portions.count)

    def _feed(self) -> None:
        """Take in the read that has come."""
        found = self.partition.inbox.arrived(readable=True)
        if found is None:
            return
        entries, asked_for = 0, self._portions.count
        for session, raws in found.items():
            hosted, count = self._asked[session], len(raws)
            entries += count
            if not hosted.gone:
                self.host.feed(hosted, raws, more=count >= asked_for)
        if found:
            self._portions.found(entries, len(found))
        self._asked = {}
        self._fruitful(bool(found))

    def _fruitful(self, found: bool) -> None:
        """Note whether a read found something; after many that did not, rest a little.

        Redis also reports a key that it has only stopped watching, its table being full; to read
        it at once would make it drop another, without end.
        """
        now = time.monotonic()
        if found or now - self._fruitless_since > 1.0:
            self._fruitless, self._fruitless_since = 0, now
        self._fruitless += not found
        if self._fruitless > _FRUITLESS_READS:
            self._rests_until = now + _REST_S

    def _idle(self, hosted: Hosted) -> bool:
        limit = self.config.idle_timeout_s
        return (
            limit > 0
            and not (hosted.queue or hosted.in_flight or hosted.answers or hosted.held)
            and time.monotonic() - hosted.active_at > limit
        )

    # Sessions go

    def _dropped(self, lost: Sequence[Hosted]) -> None:
        """Forget sessions that are another's, or that are to be claimed anew."""
        if not lost:
            return
        self.metrics.lost.inc(len(lost))
        # Asked while they are still held: where the answer fails, the next sweep finds them.
        fences = self.partition.table.fences([h.session for h in lost])
        self._forgotten([h for h, fence in zip(lost, fences, strict=True) if fence is None])
        self.host.drop(lost)
        for fence in fences:
            if fence and fence.owner != self.config.worker and self._namesake(fence.owner):
                raise Displaced(
                    f"{fence.owner}, a newer process of the name {self.config.name}, has "
                    "taken this one's sessions; this one stops"
                )
        self._missing = True  # what is still this worker's own is claimed anew at once

    def _forgotten(self, gone: Sequence[Hosted]) -> None:
        """Tell the readers of sessions that have no row any more, and forget them here too."""
        if not gone:
            return
        last_ids = {
            one.session: max(EntryId.parse(one.base), EntryId.parse(one.read_to)) for one in gone
        }
        told = self.partition.table.forget(last_ids)
        log.error("Redis has lost %d sessions; the readers of %d were told", len(gone), told)
        self.host.drop(gone)

    def _obey(self, order: str) -> None:
        """Do what an operator asks; an order is deleted once it is taken up."""
        self.partition.line.call("DEL", self.partition.keys.order(self.config.worker))
        word, _, count = order.partition(" ")
        log.info("ordered to %s", order)
        if word == "drain":
            self.ordered_to_drain = True
        elif word == "shed" and count.isdigit():
            self._shed(int(count))

    def _shed(self, count: int) -> None:
        """Hand `count` sessions on, those that were active last the last to go."""
        by_use = sorted(self.hosted.values(), key=lambda hosted: hosted.active_at)
        for hosted in [h for h in by_use if not h.action][:count]:
            self._shed_at[hosted.session] = time.monotonic()
            self.host.finish(hosted, "handback")

    def _even_out(self) -> None:
        """Hand sessions on where this worker holds clearly more than the workers' mean."""
        table = self.partition.table
        workers = table.workers()
        loads = [len(table.owned(w)) for w, alive in zip(workers, table.alive(workers), strict=True)
                 if alive]  # fmt: skip
        mean = sum(loads) / max(len(loads), 1)
        if len(self.hosted) > 1.1 * mean + 1:
            self._shed(int(len(self.hosted) - mean))

    # The dead

    def _namesake(self, worker: str) -> bool:
        return bool(self.config.name) and worker.rpartition(".")[0] == self.config.name

    def _take_from_the_dead(self, now: float) -> None:
        table = self.partition.table
        workers = [w for w in table.workers() if w != self.config.worker]
        alive = table.alive(workers)
        missing = [worker for worker, lives in zip(workers, alive, strict=True) if not lives]
        for worker in self._judge.dead(missing, now):
            self._take(worker, "dead")

    def _take(self, worker: str, why: str) -> None:
        table = self.partition.table
        taken = table.take(table.owned(worker), worker, why, self.host.room)
        self._adopt(taken.rows)
        log.info(
            "partition %d: took %d sessions of %s (%s); %d put back, %d closed, %d set aside",
            *(self.number, len(taken.rows), worker, why),
            *(taken.put_back, taken.closed, taken.set_aside),
        )
