"""The scheduler: a seed fixes every choice, so a violation can be run again and traced."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

from protocol_model.oracle import Oracle
from protocol_model.producer import Producer
from protocol_model.redis import Redis
from protocol_model.types import LEASE, Violation
from protocol_model.worker import Worker

MUTANTS = {  # a rule left out or done wrong; the search must notice each
    "no-epoch": "a commit is not fenced by the epoch",
    "no-done": "a commit is not fenced by the `done` it builds on",
    "no-cuts": "a commit does not look at `cuts`",
    "no-skipped": "entries without effect are not remembered for the replay",
    "trim-one-more": "a checkpoint trims one entry more",
    "opened-every-claim": "every claim appends `opened`",
    "control-unchecked": "control entries are applied without looking whether they still are there",
    "no-reconcile": "a claim whose answer was lost is not claimed again",
    "idle-not-busy": "an idle close does not look for new entries",
    "park-checkpoint": "parking keeps the checkpoint instead of the present state",
    "park-in-flight": "a row is parked while a round that holds it is in flight",
    "trial-adds": "`trial` raises `attempts` itself, before the run (first draft)",
    "min-literal": "`attempts` = min(attempts + 1, 2) at every death (first draft)",
    "count-unanswered-only": "a death counts only with unanswered entries (first draft)",
    "death-uncapped": "every death counts in full",
    "trial-in-company": "a suspect runs in company",
    "aside-forgets-count": "setting aside keeps state and cursor only",
    "lost-keeps-trial": "a commit refused under the right epoch does not end the trial",
    "cancel-keeps-attempts": "`cancel` of the oldest unanswered entry leaves `attempts`",
    "retry-unnamed": "`retry` takes whatever is kept, not the setting aside that it names",
    "reuse-unasked": "after `quarantined` an id is used again by a plain DEL (first draft)",
    "not-superseded": "using an id again does not supersede what was set aside",
    "hand-back-unfenced": "a hand back is not fenced",
    "first-partition-only": "a worker applies the control entries of one partition only",
    "no-leave": "a drained worker exits without looking at what it owns",
    "claim-without-lease": "a claim does not ask for the claimer's lease",
}

RATES = {  # of each fault, a step: as a rule, and where poison is the subject
    "pause": (0.010, 0.005),
    "crash": (0.008, 0.005),
    "start": (0.025, 0.120),
    "order": (0.011, 0.008),
    "outage": (0.003, 0.001),
    "time": (0.008, 0.030),
    "late": (0.020, 0.020),
    "retry": (0.020, 0.030),
}


class Sim:
    def __init__(
        self, seed: int, mutant: str = "", trace: bool = False, deaths_allowed: int | None = None
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.mutant = mutant
        self.trace: list[str] | None = [] if trace else None
        suspect = rng.choice([1, 2])  # 2, and 5 below, are the real ones; less finds more
        n = suspect + rng.choice([1, 2, 3])
        self.oracle = Oracle(*((2, deaths_allowed) if deaths_allowed else (suspect, n)))
        self.redis = Redis(self.oracle, mutant)
        self.late: list[tuple[str, tuple[Any, ...]]] = []
        self.calm = False
        self.steps = self.nonce = self.uid = self.serial = 0
        self.deadly = rng.random() < 0.5  # much poison, quick restarts, few other faults
        self.poison = 0.3 if self.deadly else rng.choice([0.0, 0.05])
        self.processes: dict[str, Worker] = {}
        ids = rng.sample("abcd", rng.randint(2, 3))
        self.producers = {s: Producer(self, s, rng.randint(1, 3)) for s in ids}
        self.oracle.process = self.processes.__getitem__
        self.oracle.has_read_end = lambda s, end: end in self.producers[s].read_ends
        self.workers = [self.start(name) for name in "XYZ"[: rng.randint(2, 3)]]
        self.epochs = [0] * Redis.PARTITIONS

    def new_uid(self) -> int:
        self.uid += 1
        return self.uid

    def log(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.steps:4d} t={self.redis.now} {text}")

    def start(self, name: str) -> Worker:
        rng = self.rng
        cap = rng.randint(1, 4)
        parts = rng.choice([[0, 1], [0, 1], [0], [1]])
        w = Worker(self, name, parts, cap, rng.randint(1, cap))
        self.log(f"! {w.id} starts, partitions {parts}, hosts {cap} in {len(w.pool)} slots")
        return w

    # -- faults
    def chaos(self) -> None:
        rng, redis = self.rng, self.redis
        live = [w for w in self.workers if w.alive]
        w = rng.choice(live) if live else None
        rates = [rate[self.deadly] for rate in RATES.values()]
        fault = rng.choices([*RATES, ""], [*rates, 1 - sum(rates)])[0]
        if fault == "start" and len(live) < 3:
            idle = [n for n in "XYZ" if n not in [w.name for w in live]]
            self.workers.append(self.start(rng.choice(idle if rng.random() < 0.8 else "XYZ")))
        elif fault == "outage":
            redis.now += 2 * LEASE
            for w in self.workers:
                w.connected = None
            self.log("! Redis was away")
        elif fault == "time":
            redis.now += rng.randint(1, LEASE)
        elif fault == "late" and self.late:
            self.arrive(rng.randrange(len(self.late)))
        elif fault == "retry" and redis.aside:
            self.blind_retry(rng.choice(sorted(redis.aside)))
        elif fault == "pause" and w:
            w.paused = redis.now + rng.randint(5, 3 * LEASE)
            self.log(f"! {w.id} pauses until {w.paused}")
        elif fault == "crash" and w:
            w.alive = False
            self.log(f"! {w.id} crashes")
        elif fault == "order" and w:
            self.serial += 1
            redis.order[w.id] = (rng.choice(["drain", "shed"]), self.serial, rng.randint(1, 3))
            self.log(f"! {w.id} is ordered: {redis.order[w.id]}")

    def arrive(self, n: int) -> None:
        if self.late[n][0] == "retry" and self.rng.random() < 0.85:
            return  # an operator's command may be very late
        script, args = self.late.pop(n)
        self.log(f"  late: {script} {args[:4]}")
        getattr(self.redis, script)(*args)

    def blind_retry(self, s: str) -> None:
        """An operator who has not asked the producer, only seen that it has read the end."""
        kept, p = self.redis.aside[s], self.producers[s]
        has_read = self.oracle.aside[s][0].end in p.read_ends
        if has_read and self.rng.random() < 0.3:
            self.late.append(("retry", (s, kept.row.epoch, self.rng.random() < 0.5)))
        elif has_read:
            answer = self.redis.retry(s, kept.row.epoch, self.rng.random() < 0.5)
            self.log(f"! blind retry {s}: {answer}")
            self.oracle.stats[f"blind {answer}"] += 1

    def operate(self) -> None:
        """The operator whom a producer has asked; his commands can be lost or late, too."""
        for s, p in self.producers.items():
            if not p.wants_retry:
                continue
            kept = self.redis.aside.get(s)
            if kept and self.oracle.retries[s] < 4:
                args = (s, kept.row.epoch, True)
                x = 1.0 if self.calm else self.rng.random()
                if x < 0.2:
                    self.late.append(("retry", args))
                    return
                answer = self.redis.retry(*args)
                self.log(f"! retry {s}: {answer}")
                if x < 0.4:
                    return
            p.wants_retry, p.retried = False, s not in self.redis.aside

    # -- the schedule
    def one(self) -> None:
        redis, rng = self.redis, self.rng
        self.steps += 1
        redis.now += rng.choice((0, 1, 1))
        ready: list[Any] = [w for w in self.workers if w.alive and w.paused <= redis.now] * 2
        ready += [p for p in self.producers.values() if not p.done]
        if ready:
            rng.choice(ready).step()
        if rng.random() < 0.1:
            self.operate()
            if self.calm and self.late:
                self.arrive(0)
        self.check()

    def check(self) -> None:
        for s in self.redis.touched:
            self.oracle.check(self.redis, s)
        self.redis.touched.clear()
        for p, part in enumerate(self.redis.parts):
            if part.epoch < self.epochs[p]:
                raise Violation("epoch-falls")
            self.epochs[p] = part.epoch

    def settled(self) -> bool:
        redis = self.redis
        return (
            all(p.done for p in self.producers.values())
            and not any(part.control.entries or part.waiting for part in redis.parts)
            and all(
                redis.row[s].status == "live" and not self.oracle.pending[s]
                for part in redis.parts
                for s in part.sessions
            )
        )

    def run(self) -> Counter[str]:
        rng = self.rng
        for _ in range(rng.randint(60, rng.choice([320, 320, 900]))):
            self.chaos()
            self.one()
        self.calm = True
        self.log("! calm")
        self.late.sort(key=lambda x: x[0] == "retry")
        while self.late and self.late[0][0] != "retry":
            self.arrive(0)
        self.workers = [w for w in self.workers if w.alive]
        for w in self.workers:
            w.paused = 0
        split = rng.random() < 0.5
        for n in range(6000):
            if n % 5 == 0:
                if self.settled():
                    break
                self.keep_served(split)
            self.one()
        else:
            rows = {s: (r.status, r.owner, r.attempts) for s, r in self.redis.row.items()}
            raise Violation("stuck", f"{rows}, aside {list(self.redis.aside)}")
        return self.oracle.stats

    def keep_served(self, split: bool) -> None:
        """Once calm, every partition has a worker with room; poison may go on killing them."""
        self.workers = [w for w in self.workers if w.alive]
        for parts in ([0], [1]) if split else ([0, 1],):
            name = "W" + "".join(map(str, parts))
            if not any(w.name == name for w in self.workers):
                self.workers.append(Worker(self, name, parts, 9, 2))
                self.log(f"! {self.workers[-1].id} starts")


def search(
    seeds: Iterable[int], mutant: str = "", deaths_allowed: int | None = None, stop: bool = False
) -> tuple[dict[str, tuple[int, int, str]], Counter[str]]:
    """Violations by kind (how often, a seed, its text), and what was exercised."""
    found: dict[str, tuple[int, int, str]] = {}
    stats: Counter[str] = Counter()
    for seed in seeds:
        sim = Sim(seed, mutant, deaths_allowed=deaths_allowed)
        try:
            stats.update(sim.run())
        except Violation as v:
            n = found[v.kind][0] if v.kind in found else 0
            found[v.kind] = (n + 1, seed, str(v))
            if stop:
                break
        stats["schedules"] += 1
        stats["steps"] += sim.steps
    return found, stats
