"""The worker's loop: take in what has come, form a round and launch it, send, collect.

While the device runs one round, another is formed, the answers of those before are on their way to
Redis, and the next frames on theirs from it. A partition that cannot be reached is left alone until
it can; the others go on.

    worker = Worker(config, model)
    worker.prepare()            # measure, compile, agree with the app's other workers
    while not worker.done:
        worker.turn()
    worker.drain()
"""

from __future__ import annotations

import logging
import select
import time
from collections import deque
from collections.abc import Callable

from slotstream.endpoint import Endpoint
from slotstream.lines import Line
from slotstream.names import Keys, config_key
from slotstream_worker.agreement import agree, partitions_of
from slotstream_worker.checkpoints import Allowance
from slotstream_worker.config import WorkerConfig
from slotstream_worker.engine.engine import Engine
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.host import Host
from slotstream_worker.metrics import Metrics
from slotstream_worker.publisher import Publisher
from slotstream_worker.rounds import Flying
from slotstream_worker.shard import Displaced, Shard
from slotstream_worker.store import appconfig
from slotstream_worker.store.appconfig import AppConfig
from slotstream_worker.store.lease import Lease
from slotstream_worker.store.partition import Partition
from slotstream_worker.weights.gauges import Gauges
from slotstream_worker.weights.receiver import Receiver
from slotstream_worker.weights.swap import Swap

__all__ = ["Displaced", "NotHandedBack", "Worker"]

log = logging.getLogger(__name__)

_LONGEST_SLEEP_S = 0.25
"""Signals are looked at between turns, so no sleep is longer."""
_GLANCE_S = 0.0005
"""How long news is waited for at a time while the device runs a long round."""
_ROUNDS_ALOFT = 2
"""Rounds under way at a time: while one runs, another is formed or published."""


class NotHandedBack(RuntimeError):
    """A drain gave up: Redis could not be reached for a whole lease."""


class Worker:
    """One worker. Construction opens nothing; `prepare` does."""

    def __init__(self, config: WorkerConfig, model: StreamModel) -> None:
        self.config, self.model = config, model
        self.metrics = Metrics()
        self.endpoint = Endpoint(config.redis, name=f"slotstream-worker:{config.worker}")
        self.engine = Engine(model, config.slots)
        self.host = Host(
            self.engine,
            max_sessions=config.max_sessions or 4 * config.slots,
            max_frame_bytes=config.max_frame_bytes,
            finite=config.finite,
            read_ahead=config.read_ahead,
            round_wait_s=config.round_wait_s,
            round_rows=config.round_rows,
        )
        self.shards: list[Shard] = []
        self.lease: Lease | None = None
        self.receiver = Receiver(config, self.engine, Gauges(self.metrics.registry))
        self._swap: Swap | None = None
        self._flying: deque[Flying] = deque()
        self._readable: set[int] = set()
        self._watched: list[int] = []
        self._poll = select.poll()
        self._agreed: AppConfig | None = None

    def prepare(self, progress: Callable[[int], None] = lambda _count: None) -> None:
        """Connect, agree on the row counts, compile; nothing is owned before it is done.

        Raises:
            Disagreement: the app is configured for another model, or another machine's bits.
            CannotStream: the model mixes its rows.
        """
        line = Line(self.endpoint.pool(config_key(self.config.app)))
        try:
            count = partitions_of(line, self.config)
            everyone = [Keys(self.config.app, p) for p in range(count)]
            served = [k for k in everyone if self.config.serves(k.partition)]
            if self.lease is None:
                lease = Lease(
                    self.endpoint,
                    served,
                    self.config.worker,
                    lease_s=self.config.lease_s,
                    stall_s=self.config.stall_s,
                )
                lease.start()
                self.lease = lease
            self._agreed, exact = agree(
                line, self.endpoint, self.config, everyone, self.engine, progress
            )
        finally:
            line.close()
        self.metrics.inexact.set(0 if exact else 1)
        allowance = Allowance(self.config.checkpoint_bytes_per_s)
        self._first_weights(allowance)
        self.shards = []
        for keys in served:
            partition = Partition(self.config, self.endpoint, keys.partition)
            publisher = Publisher(self.config, self.host, self.metrics, keys.partition, allowance)
            self.shards.append(Shard(self.config, partition, self.host, publisher, self.metrics))
        for shard in self.shards:
            shard.join()

    def _first_weights(self, allowance: Allowance) -> None:
        """Begin on the version that is current, once it is here; nothing is owned before."""
        if self._swap is None:
            self.receiver.start()
            self._swap = Swap(self.host, self.receiver, allowance)
        while not self.receiver.synced.wait(_LONGEST_SLEEP_S):
            if self.lease:
                self.lease.beat()
        if self.receiver.error:
            raise self.receiver.error
        self._swap.turn()

    @property
    def done(self) -> bool:
        """Whether an operator has ordered this worker to drain."""
        return any(shard.ordered_to_drain for shard in self.shards)

    def turn(self) -> None:
        """One turn of the loop. An outage of a partition is noted, and waited out in later turns.

        Raises:
            Displaced: a newer process of this worker's name has taken over.
            redis.RedisError: what no waiting mends (wrong credentials, a refused command).
        """
        if self.lease:
            self.lease.beat()
        self._look(self._rest_s())
        self._each(self._receive)
        if self._swap:
            self._swap.turn()
        formed = self._may_launch and self._launch()
        self._each(Shard.send)
        if not (formed and self._may_launch) and self._flying and self._flying[0].landing:
            self.collect()
            self._each(Shard.publish)
            self.engine.pool.settle()  # after the answers are on their way: nobody waits for it
        self.metrics.sessions.set(len(self.host))
        self.metrics.parked.set(self.host.rows.parked)

    @property
    def _may_launch(self) -> bool:
        """Whether another round could be formed now."""
        return len(self._flying) < _ROUNDS_ALOFT and self.host.has_work

    def _launch(self) -> bool:
        """Form a round and launch it; whether there was one."""
        # A partition that cannot be reached holds nobody else up.
        reached = [shard for shard in self.shards if not shard.outage.on]
        calm = not any(s.publisher.in_doubt or self.host.acting(s.number) for s in reached)
        formed = self.host.form(may_run=self._may_run, calm=calm)
        if formed:
            self._flying.append(self.host.launch(formed))
        return bool(formed)

    def collect(self) -> None:
        """Wait for the oldest round under way, if there is one."""
        if not self._flying:
            return
        frames = self.host.collect(self._flying.popleft())
        self.metrics.rounds.inc()
        self.metrics.frames.inc(frames)
        self.metrics.round_rows.observe(frames)

    def drain(self) -> None:
        """Claim no more, finish the round, checkpoint, hand every session back, end the lease.

        Raises:
            NotHandedBack: a partition could not be reached for a whole lease of the drain; its
                sessions are then taken by others.
        """
        while self._flying:
            self.collect()
        began = time.monotonic()
        for act in (Shard.hand_back, Shard.leave):
            waiting = list(self.shards)
            while waiting:
                waiting = [s for s in waiting if not self._guarded(s, act)]
                # An outage may be old when the drain begins: what counts is how long it tried.
                tried_s = time.monotonic() - began
                if any(min(s.outage.lasts_s, tried_s) > self.config.lease_s for s in waiting):
                    raise NotHandedBack(
                        f"{len(self.host)} sessions could not be handed back: Redis could not be "
                        f"reached for {tried_s:.1f} s; they are taken when the lease has ended"
                    )
                time.sleep(min((s.outage.wait_s for s in waiting), default=0.0))
            if act is Shard.hand_back and self.lease:
                self.lease.stop()  # before the lease is deleted, or it would come back
        log.info("drained")

    def close(self) -> None:
        """Close all connections."""
        if self.lease:
            self.lease.stop()
        self.receiver.stop()
        for shard in self.shards:
            shard.partition.close()
        self.endpoint.close()

    def _each(self, act: Callable[[Shard], None]) -> None:
        for shard in self.shards:
            self._guarded(shard, act)

    def _guarded(self, shard: Shard, act: Callable[[Shard], None]) -> bool:
        """Run `act` on a shard that can be reached, connecting anew first where it broke."""
        if shard.outage.on:
            if shard.outage.wait_s or not shard.outage.through(lambda: self._reconnect(shard)):
                return False
            shard.outage.over()
        return shard.outage.through(lambda: act(shard))

    def _reconnect(self, shard: Shard) -> None:
        """Connect a shard anew, after giving a Redis that lost its data the configuration back."""
        if self._agreed:
            line = Line(self.endpoint.pool(config_key(self.config.app)))
            try:
                appconfig.write(line, self.config.app, self._agreed)
            finally:
                line.close()
        shard.connect()

    def _may_run(self, partition: int, session: str) -> bool:
        """Ask a suspect's shard whether it may run now, which counts an attempt."""
        (shard,) = (s for s in self.shards if s.number == partition)
        allowed = False

        def ask(shard: Shard) -> None:
            nonlocal allowed
            allowed = shard.may_run(self.host.hosted[session])

        return self._guarded(shard, ask) and allowed

    def _receive(self, shard: Shard) -> None:
        shard.receive(self._readable)

    def _look(self, timeout_s: float) -> None:
        """Note which sockets have something to read; wait for the first as long as `timeout_s`."""
        watched = [
            number
            for shard in self.shards
            if not shard.outage.on and shard.partition.connected
            for number in shard.partition.filenos
        ]
        if watched != self._watched:
            self._poll = select.poll()
            for number in watched:
                self._poll.register(number, select.POLLIN)
            self._watched = watched
        self._readable = {number for number, _ in self._poll.poll(1e3 * timeout_s)}

    def _rest_s(self) -> float:
        """How long to sleep on the sockets where news comes in, while there is nothing to do."""
        if self._flying:
            # News is taken in while the device works: Redis would be idle otherwise.
            return 0.0 if self._flying[0].landing else _GLANCE_S
        wait_s = self.host.wait_s
        if (self.host.has_work and not wait_s) or any(shard.waits for shard in self.shards):
            return 0.0
        up = [shard for shard in self.shards if not shard.outage.on]
        waits = [shard.outage.wait_s for shard in self.shards if shard.outage.on]
        due = [shard.publisher.next_due_s() for shard in up]
        due += [shard.rests_s for shard in up if shard.rests_s]
        return min([_LONGEST_SLEEP_S, wait_s or _LONGEST_SLEEP_S, *waits, *due])
