"""A producer: one session id, incarnation after incarnation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from protocol_model.types import ZERO, Control, Entry, Id, Violation

if TYPE_CHECKING:
    from protocol_model.sim import Sim

Step = tuple[str, str, bool]  # push/open/close, kind of entry, end


class Producer:
    def __init__(self, sim: Sim, s: str, incarnations: int) -> None:
        self.sim, self.s, self.incarnations = sim, s, incarnations
        self.tag, self.pos, self.number = -1, ZERO, 1
        self.explicit = False
        self.token: str | None = None
        self.mine: list[Id] = []
        self.read_ends: set[tuple[int, Id, str]] = set()
        self.reason = ""
        self.wants_retry = self.retried = self.done = False
        self.program = self.run()

    def step(self) -> None:
        if next(self.program, "done") == "done":
            self.done = True

    # -- commands
    def read(self) -> None:
        st = self.sim.redis.out.get(self.s)
        for n, (i, (tag, reason)) in enumerate(st.between(self.pos) if st else []):
            if n == 2:
                break
            self.pos = i
            if tag != self.tag:
                raise Violation("reader-sees-old-replies", f"{self.s} {i} of {tag} as {self.tag}")
            if reason:
                self.read_ends.add((tag, i, reason))
                self.reason = reason
                self.sim.log(f"P {self.s} reads end {reason}")

    def push(self, kind: str, end: bool = False) -> Iterator[None]:
        sim, rng = self.sim, self.sim.rng
        poison = ""
        if kind in ("frame", "resetframe") and rng.random() < sim.poison:
            poison = rng.choice(
                ["always", "always", "first1", "first2", "first4", "again", "again"]
            )
        e = Entry(kind, rng.randrange(10**6), end, self.tag, sim.new_uid(), poison)
        i = (self.number, 0) if self.explicit else None
        self.number += 1
        for _ in range(2 if rng.random() < 0.15 else 1):  # repeated, its answer was lost
            got = sim.redis.push(self.s, i, e)
            sim.log(f"P {self.s} push {kind} {poison} end={end} -> {got}")
            if got and not end:
                self.mine.append(got)
            yield
            e = Entry(kind, e.x, end, self.tag, sim.new_uid(), poison)
        if self.mine and rng.random() < 0.12:
            i = rng.choice([self.mine[-1], rng.choice(self.mine)])
            if sim.redis.cancel(self.s, i):
                sim.log(f"P {self.s} cancels {i}")
            yield

    def control(self, op: str) -> None:
        self.sim.redis.push_control(Control(op, self.s, self.token, self.tag))
        self.sim.log(f"P {self.s} {op} token {self.token}")

    # -- the program
    def plan(self, last: bool) -> tuple[list[Step], bool]:
        rng = self.sim.rng
        kinds = ["frame"] * 7 + ["bad", "unknown", "reset", "resetframe"]
        steps: list[Step] = [("push", rng.choice(kinds), False) for _ in range(rng.randint(0, 6))]
        how = rng.choice(["end", "end", "close", "both"] + ["none"] * (2 * last))
        if how in ("end", "both"):
            steps.append(("push", rng.choice(["endonly", "frame", "bad"]), True))
        at = rng.choice([0, 0, 0, rng.randint(0, len(steps))])
        steps.insert(at, ("open", "", False))
        if how in ("close", "both"):
            steps.insert(rng.randint(at + 1, len(steps)), ("close", "", False))
            if rng.random() < 0.3:
                steps.append(("close", "", False))
        if how != "none":  # pushes behind the end
            steps += [("push", "frame", False)] * rng.choice([0, 0, 1, 2])
        if self.token and rng.random() < 0.3:
            steps.insert(rng.randint(at + 1, len(steps)), ("open", "", False))
        return steps, how != "none"

    def run(self) -> Iterator[None]:
        sim, rng = self.sim, self.sim.rng
        for k in range(self.incarnations):
            if k and self.reason != "quarantined":
                yield from self.forget()
            self.tag, self.pos, self.mine, self.reason = k, ZERO, [], ""
            self.explicit = rng.random() < 0.6
            self.number = rng.choice([1, 1, 1, 5000])  # own ids, sometimes ahead of the clock
            self.token = rng.choice([f"t{k}", f"t{k}", None])
            steps, ends = self.plan(k == self.incarnations - 1)
            for what, kind, end in steps:
                if what == "push":
                    yield from self.push(kind, end)
                else:
                    self.control(what)
                    yield
                while rng.random() < 0.4:
                    self.read()
                    yield
            if not ends:
                return
            yield from self.wait_for_end()
            while self.reason == "quarantined":  # and perhaps retried since, unasked
                if rng.random() < 0.6:
                    yield from self.ask_for_retry()
                if not self.retried and sim.redis.forget(self.s, self.pos):
                    break
                yield
                yield from self.resume()
            sim.log(f"P {self.s} is through with {k}")

    def forget(self) -> Iterator[None]:
        if self.sim.rng.random() < 0.2:
            self.sim.redis.expire(self.s)
            yield
        for key in ("in", "out"):
            self.sim.redis.delete(self.s, key)
            yield

    def wait_for_end(self) -> Iterator[None]:
        while not self.reason:
            self.read()
            yield

    def ask_for_retry(self) -> Iterator[None]:
        """The session was set aside: an operator, who knows of us, has it run again."""
        sim, rng = self.sim, self.sim.rng
        if rng.random() < 0.2:
            sim.redis.expire(self.s)
        yield
        self.wants_retry, self.retried = True, False
        while self.wants_retry:
            yield

    def resume(self) -> Iterator[None]:
        """It has been retried: its replies begin again, at those not given before."""
        rng = self.sim.rng
        self.pos, self.reason, self.retried = ZERO, "", False
        for _ in range(rng.randint(0, 2)):
            yield from self.push("frame")
        self.control("close")
        yield
        yield from self.wait_for_end()
