"""A worker: one command or one step of its engine at a time, chosen at random."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from protocol_model.types import LEASE, MARK, Answer, Control, Entry, Id, Row, run_entry

if TYPE_CHECKING:
    from protocol_model.sim import Sim

Action = Callable[[], Any]


class Held:
    """A session as its owner knows it."""

    def __init__(self, s: str, row: Row, suspect: bool) -> None:
        self.s, self.row, self.epoch = s, row, row.epoch
        self.suspect = suspect
        self.on_trial = False  # the `trial` script has said ok
        self.loaded = False  # replayed up to `done`
        self.slot: int | None = None  # where the state is: a slot of the pool, or host memory
        self.host = self.saved = row.state
        self.base = self.pos = self.last_read = self.cursor = row.done
        self.cursor = row.cursor
        self.ahead: list[tuple[Id, Entry]] = []
        self.marked = False
        self.leaving = False  # a hand back has been sent
        self.flight: tuple[Id, Entry, int, tuple[str, Any]] | None = None
        self.answers: list[Answer] = []
        self.call: tuple[Id, list[Answer], int | None] | None = None
        self.final: tuple[str, Answer | None] | None = None

    @property
    def at_rest(self) -> bool:
        """Everything it ran has been committed."""
        return not (self.flight or self.answers or self.call or self.final)


class Worker:
    def __init__(self, sim: Sim, name: str, parts: list[int], cap: int, slots: int) -> None:
        sim.nonce += 1
        self.sim, self.name, self.id, self.parts = sim, name, f"{name}.{sim.nonce}", parts
        self.cap, self.pool = cap, [0] * slots
        self.held: dict[str, Held] = {}
        self.batch: dict[int, list[tuple[Id, Control]]] = {}
        self.suspected: list[tuple[str, str, int, bool]] = []
        self.trial: Held | None = None
        self.connected: int | None = None
        self.started = self.draining = self.exited = False
        self.alive, self.killed_by, self.paused = True, None, 0
        self.left: set[int] = set()
        self.last_order = self.shed = self.hold_off = 0
        sim.processes[self.id] = self

    # -- talking to Redis
    def call(self, script: str, *args: Any) -> tuple[bool, Any]:
        """(True, answer), or (False, None): not done, done, or done later, and nobody knows."""
        sim, x = self.sim, self.sim.rng.random()
        fn = getattr(sim.redis, script)
        p = 0.0 if sim.calm else 0.15
        if x >= p:
            return True, fn(*args)
        if x < p * 0.4:
            sim.log(f"  {self.id} {script} {args[:3]}: done, answer lost")
            fn(*args)
        elif x < p * 0.8:
            sim.log(f"  {self.id} {script} {args[:3]}: comes late")
            sim.late.append((script, args))
        return False, None

    def step(self) -> None:
        actions = self.actions()
        if actions:
            self.sim.rng.choice(actions)()

    def actions(self) -> list[Action]:
        redis, rng = self.sim.redis, self.sim.rng
        if self.connected is None:
            return [self.connect]
        todo: list[Action] = []
        parts = self.parts[:1] if self.sim.mutant == "first-partition-only" else self.parts
        for p in self.parts:
            left = redis.parts[p].lease.get(self.id, -1) - redis.now
            if left < LEASE // 2 and p not in self.left:
                todo += [partial(redis.renew, p, self.id)] * 4
            if p in self.batch or (p in parts and redis.parts[p].control.entries):
                todo.append(partial(self.apply_control, p))
        if not self.started:
            return [*todo, self.start]
        if self.suspected:
            todo += [self.take_over] * 2
        if self.draining and not self.held and not self.suspected:
            todo.append(self.leave)
        elif not self.draining:
            self.look_for_work(todo)
        todo.append(self.sweep)
        if redis.order.get(self.id):
            todo.append(self.read_order)
        for h in self.held.values():
            self.session_actions(h, todo)
        if any(h.flight for h in self.held.values()):
            todo += [self.land] * 3
        elif self.trial:
            h = self.trial
            if h.on_trial and h.ahead and not (h.answers or h.final or h.leaving):
                todo += [partial(self.launch, [h])] * 3
        else:
            ready = [h for h in self.held.values() if self.runnable(h)]
            if ready:
                todo += [partial(self.launch, ready)] * 3
        if any(h.slot is not None for h in self.held.values()) and rng.random() < 0.2:
            todo.append(self.park_one)
        return todo

    def look_for_work(self, todo: list[Action]) -> None:
        redis = self.sim.redis
        if self.suspected:
            return
        if len(self.held) < self.cap and redis.now >= self.hold_off:
            todo += [partial(self.claim, p) for p in self.parts if redis.parts[p].waiting]
        if redis.now - (self.connected or 0) >= LEASE:
            todo.append(self.judge)

    def session_actions(self, h: Held, todo: list[Action]) -> None:
        redis, rng, calm = self.sim.redis, self.sim.rng, self.sim.calm
        if h.leaving:
            todo += [partial(self.hand_back, h)] * 2
            return
        st = redis.in_.get(h.s)
        if st and st.last > h.last_read and not h.final and not h.marked:
            todo += [partial(self.read, h)] * 2
        if h.call:
            todo += [partial(self.deliver, h)] * 2
        elif h.answers or (h.loaded and h.base != h.cursor and rng.random() < (0.1 if calm else 1)):
            todo += [partial(self.prepare_commit, h)] * (2 if h.answers else 1)
        if h.final and not h.call and not h.answers:
            todo += [partial(self.end, h)] * 2
        if h.marked and not h.ahead and not h.flight and not h.final:
            h.final = ("close", None)
        may_try = h.suspect and not h.on_trial and h.ahead and self.trial in (None, h)
        if may_try and not any(x.flight for x in self.held.values()):
            todo += [partial(self.begin_trial, h)] * 2
        if not (h.loaded or h.suspect or h.final or self.trial) and rng.random() < 0.3:
            todo.append(partial(self.load, h))
        if h.flight or h.final:
            return
        if self.draining or self.shed or (not calm and rng.random() < 0.02):
            todo.append(partial(self.hand_back, h))
        if not calm and h.at_rest and not h.ahead and rng.random() < 0.03:
            todo.append(partial(self.end_idle, h))

    # -- liveness
    def connect(self) -> None:
        self.connected = self.sim.redis.now
        self.sim.log(f"{self.id} connects")

    def start(self) -> None:
        """What older processes of the own name own is taken at once."""
        redis = self.sim.redis
        if not all(redis.alive(p, self.id) for p in self.parts):
            return
        self.started = True
        self.suspected = [
            (s, row.owner, row.epoch, False)
            for s, row in redis.row.items()
            if row.owner.split(".")[0] == self.name and row.owner != self.id and self.serves(s)
        ]

    def serves(self, s: str) -> bool:
        return self.sim.redis.part_of(s) in self.parts

    def judge(self) -> None:
        redis = self.sim.redis
        self.suspected = [
            (s, redis.row[s].owner, redis.row[s].epoch, True)
            for p in self.parts
            for s in sorted(redis.parts[p].sessions)
            if redis.row[s].owner not in ("", self.id) and not redis.alive(p, redis.row[s].owner)
        ]

    def take_over(self) -> None:
        s, old, epoch, expired = self.suspected.pop()
        if len(self.held) < self.cap or not expired:
            self.hosts(self.call("take", self.id, s, old, epoch, expired))
        else:
            self.call("put_back", s, old, epoch)

    def claim(self, p: int) -> None:
        self.hosts(self.call("claim_waiting", p, self.id))

    def hosts(self, answer: tuple[bool, Any]) -> None:
        if answer[1]:
            s, row = answer[1]
            if s in self.held:
                self.drop(self.held[s])
            self.held[s] = Held(s, row, row.attempts >= self.sim.redis.suspect)
            self.sim.log(f"{self.id} owns {s} {row}")

    def sweep(self) -> None:
        redis = self.sim.redis
        for s, h in list(self.held.items()):
            row = redis.row.get(s)
            mine = row and row.owner == self.id and row.epoch == h.epoch
            if not mine or (row.done != h.base and not h.call):
                self.drop(h)
        if self.sim.mutant == "no-reconcile" or self.draining:
            return
        for p in self.parts:
            for s in sorted(redis.parts[p].owned[self.id] - set(self.held)):
                self.hosts(self.call("reclaim", self.id, s))
                return

    def drop(self, h: Held) -> None:
        if self.held.get(h.s) is h:
            del self.held[h.s]
        if self.trial is h:
            self.trial = None

    def lost(self, h: Held) -> None:
        self.sim.log(f"{self.id} lost {h.s} epoch {h.epoch}")
        self.drop(h)
        row = self.sim.redis.row.get(h.s)
        if row and row.owner != self.id and row.owner.split(".")[0] == self.name:
            self.sim.log(f"{self.id} is displaced by {row.owner} and stops")
            self.alive = False

    # -- orders, drain
    def read_order(self) -> None:
        what, serial, n = self.sim.redis.order[self.id]
        if serial <= self.last_order:
            return
        self.last_order = serial
        self.sim.oracle.stats[f"orders to {what}"] += 1
        self.sim.log(f"{self.id} reads its order: {what} {n}")
        if what == "drain":
            self.draining = True
        else:
            self.shed, self.hold_off = min(n, len(self.held)), self.sim.redis.now + LEASE

    def leave(self) -> None:
        for p in self.parts:
            if p not in self.left and self.sim.mutant != "no-leave":
                if self.call("leave", p, self.id)[0]:
                    self.left.add(p)
                return
        self.alive, self.exited = False, True
        self.sim.log(f"{self.id} exits")
        self.sim.oracle.stats["drained"] += 1

    def hand_back(self, h: Held) -> None:
        """What is not committed is dropped; the next owner runs it again. From here on it rests."""
        h.leaving, state = True, None
        if h.loaded and h.at_rest and h.base > h.cursor and self.sim.rng.random() < 0.7:
            state = self.state(h)
        done, answer = self.call("hand_back", self.id, h.s, h.epoch, h.base, state)
        if done:
            self.sim.log(f"{self.id} hands back {h.s}: {answer}")
            self.shed = max(0, self.shed - 1)
            self.drop(h)

    # -- control
    def apply_control(self, p: int) -> None:
        if p not in self.batch:
            self.batch[p] = list(self.sim.redis.parts[p].control.entries.items())[:2]
        elif self.call("apply_control", p, self.batch[p])[0]:
            self.sim.log(f"{self.id} applied {[(c.op, c.session) for _, c in self.batch[p]]}")
            del self.batch[p]

    # -- one session: read, run, commit
    def read(self, h: Held) -> None:
        st = self.sim.redis.in_.get(h.s)
        for n, (i, e) in enumerate(list(st.between(h.last_read)) if st else []):
            if n == 3:
                break
            h.last_read = i
            if e.kind == MARK:
                h.marked = True
                if self.sim.rng.random() < 0.5:
                    h.ahead = []  # cancels what waits
                break
            h.ahead.append((i, e))

    def runnable(self, h: Held) -> bool:
        if h.leaving:
            return False
        together = h.on_trial and self.sim.mutant == "trial-in-company"
        return bool(h.ahead) and not h.final and (not h.suspect or together)

    def begin_trial(self, h: Held) -> None:
        if self.sim.mutant != "trial-in-company":
            self.trial = h  # from here on nothing else runs, whatever becomes of the answer
        done, answer = self.call("trial", self.id, h.s, h.epoch, h.row.cuts)
        if not done:
            return
        self.sim.log(f"{self.id} trial {h.s}: {answer}")
        if answer == "lost":
            self.lost(h)
        else:
            h.on_trial = True

    def dies_of(self, h: Held, e: Entry) -> bool:
        row = self.sim.redis.row.get(h.s)
        owns = bool(row and row.owner == self.id and row.epoch == h.epoch)
        if not self.sim.oracle.kills_worker(h.s, e, owns):
            return False
        self.alive, self.killed_by = False, h.s
        self.sim.log(f"! {self.id} killed by {h.s} {e.poison} (run {self.sim.oracle.runs[e.uid]})")
        return True

    def load(self, h: Held) -> bool:
        """Replay: what the row's state does not hold yet, without publishing."""
        row, st = h.row, self.sim.redis.in_.get(h.s)
        again = [] if not st else [(i, e) for i, e in st.between(row.cursor, row.done)]
        again = [(i, e) for i, e in again if e.kind != MARK]
        if len(again) < row.count:
            h.final = ("replay_gap", None)
            return False
        for i, e in again:
            if i not in row.skipped:
                if self.dies_of(h, e):
                    return False
                h.host, _ = run_entry(h.host, e)
        h.loaded = True
        return True

    def launch(self, ready: list[Held]) -> None:
        """One round: at most one entry of each session; nothing changes before it lands."""
        rng = self.sim.rng
        chosen: list[Held] = []
        for h in rng.sample(ready, rng.randint(1, min(len(ready), len(self.pool)))):
            if not h.loaded and not self.load(h):
                if not self.alive:
                    return
                continue
            if self.bring_in(h, chosen):
                chosen.append(h)
        for h in chosen:
            i, e = h.ahead.pop(0)
            if self.dies_of(h, e):
                return
            new, reply = run_entry(self.state(h), e)
            if reply[0] == "output" and rng.random() < 0.06:
                new, reply = self.state(h), ("error", "launch")
            h.flight = (i, e, new, reply)

    def land(self) -> None:
        for h in self.held.values():
            if not h.flight:
                continue
            i, e, new, reply = h.flight
            h.flight, h.pos = None, i
            if h.slot is not None:
                self.pool[h.slot] = new
            answer = Answer(i, e, reply)
            if e.end:
                h.final = ("end", answer)
            else:
                h.answers.append(answer)

    def prepare_commit(self, h: Held) -> None:
        rng = self.sim.rng
        part = h.answers[: rng.choice([len(h.answers), rng.randint(0, len(h.answers))])]
        last = part[-1].id if part else h.base
        state = None
        if rng.random() < 0.4 and last == h.pos and last > h.cursor and not h.final:
            state = self.state(h)
        if part or state is not None:
            h.call = (h.base, part, state)

    def deliver(self, h: Held) -> None:
        base, part, state = h.call or (h.base, [], None)
        done, answer = self.call("commit", self.id, h.s, h.epoch, h.row.cuts, base, part, state)
        if not done:
            return
        self.sim.log(f"{self.id} commit {h.s} {base} {[a.id for a in part]} {state}: {answer}")
        if answer == "lost":
            self.lost(h)
            return
        h.call, h.answers = None, h.answers[len(part) :]
        if part:
            h.base = part[-1].id
            h.suspect = h.on_trial = False
            if self.trial is h:
                self.trial = None
        if state is not None:
            h.cursor, h.saved = h.base, state

    def end(self, h: Held) -> None:
        reason, answer = h.final or ("", None)
        done, said = self.call("end", self.id, h.s, h.epoch, h.row.cuts, h.base, reason, answer)
        if done:
            self.sim.log(f"{self.id} end {h.s} {reason}: {said}")
            if said == "lost":
                self.lost(h)
            else:
                self.drop(h)

    def end_idle(self, h: Held) -> None:
        done, answer = self.call("end_idle", self.id, h.s, h.epoch, h.base)
        if done:
            self.sim.log(f"{self.id} end_idle {h.s}: {answer}")
            if answer == "lost":
                self.lost(h)
            elif answer == "ok":
                self.drop(h)

    # -- parking
    def state(self, h: Held) -> int:
        return h.host if h.slot is None else self.pool[h.slot]

    def park(self, h: Held) -> None:
        h.host, h.slot = self.state(h), None
        self.sim.oracle.stats["parked"] += 1
        if self.sim.mutant == "park-checkpoint":
            h.host = h.saved

    def park_one(self) -> None:
        inside = [h for h in self.held.values() if h.slot is not None]
        if self.sim.mutant != "park-in-flight":
            inside = [h for h in inside if not h.flight]
        if inside:
            self.park(self.sim.rng.choice(inside))

    def bring_in(self, h: Held, chosen: list[Held]) -> bool:
        if h.slot is not None:
            return True
        used = {x.slot: x for x in self.held.values() if x.slot is not None}
        free = [n for n in range(len(self.pool)) if n not in used]
        if not free:
            idle = [x for x in used.values() if x not in chosen and not x.flight]
            if not idle:
                return False
            self.park(self.sim.rng.choice(idle))
            return self.bring_in(h, chosen)
        n = free[0]
        self.pool[n], h.slot = h.host, n
        return True
