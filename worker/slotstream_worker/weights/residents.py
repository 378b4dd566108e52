"""The versions that are on the device, and which session runs with which. No Redis.

The rule: a session changes its version with a checkpoint, when nothing of it is under way. Its row
then says at once where it stands and what runs everything after that; so whoever replays it runs
each entry with the version that answered it.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from slotstream_worker.engine.engine import Engine, Weights
from slotstream_worker.hosted import Hosted

log = logging.getLogger(__name__)


class Residents:
    """Versions of one engine, and the sessions that run with each.

    Args:
        engine: whose variables they are.
        most: versions kept on the device for sessions that are pinned to theirs.
    """

    def __init__(self, engine: Engine, most: int = 2) -> None:
        self._engine, self.most = engine, most
        self.base = engine.model.weights
        """What the worker was started with; it stays on the device."""
        engine.versions[self.base] = engine.model.variables
        self.current = self.base
        """New sessions begin on it, and others change to it."""
        self.coming = ""
        """What is to become current, as soon as it is here."""
        self.policy = "keep"
        self.changes = 0
        self._used: Counter[str] = Counter()
        self.looks = 0
        """How often the catalogue has been looked at."""
        self._lagging: deque[Hosted] = deque()
        self._unsure: deque[tuple[int, Hosted]] = deque()
        self._changing: dict[int, dict[Hosted, None]] = {}
        self._waiting: dict[str, dict[Hosted, None]] = {}

    # Sessions

    def adopt(self, hosted: Hosted) -> None:
        """Take in a session that has been claimed; one whose version is not here waits for it.

        What it ran with elsewhere may be newer than all that is known here: so nothing is made of
        it before the catalogue has been looked at once more (`look`).
        """
        self._used[hosted.weights] += 1
        if hosted.weights == self.current:
            return
        if hosted.weights in self._engine.versions:
            self._unsure.append((self.looks, hosted))
        else:
            hosted.halt = "fetch"
            self._waiting.setdefault(hosted.weights, {})[hosted] = None

    def drop(self, hosted: Hosted) -> None:
        """It is not held any more."""
        self._unuse(hosted.weights)
        self._changing.get(hosted.partition, {}).pop(hosted, None)
        self._waiting.get(hosted.weights, {}).pop(hosted, None)

    def of(self, sessions: Sequence[Hosted]) -> Weights:
        """The version that all of a round run with, or that of each."""
        if len(self._used) == 1:
            return next(iter(self._used))
        return [hosted.weights for hosted in sessions]

    def sessions(self) -> dict[str, int]:
        """How many sessions run with each version."""
        return dict(self._used)

    # Versions come and go

    def add(self, version: str, variables: Any) -> list[Hosted]:
        """A version is on the device; returns the sessions that waited for it."""
        self._engine.versions[version] = variables
        waited = list(self._waiting.pop(version, {}))
        if version != self.current:
            self._lagging.extend(waited)
        return waited

    def missing(self) -> dict[str, bool]:
        """Versions that sessions wait for, and whether one cannot do without it.

        A session that is at a checkpoint can, unless it is pinned.
        """
        return {
            version: self.policy == "pin" or any(h.unsettled for h in waiting)
            for version, waiting in self._waiting.items()
            if waiting
        }

    def look(self, looks: int) -> None:
        """The catalogue has been looked at so often: the last look but one began before now."""
        self.looks = looks
        while self._unsure and self._unsure[0][0] + 1 < looks:
            self._lagging.append(self._unsure.popleft()[1])

    def give_up(self, version: str, reason: str) -> None:
        """A version cannot be had. Who is at a checkpoint changes; who is not is left as it is."""
        for hosted in list(self._waiting.pop(version, {})):
            if hosted.gone:
                continue
            if hosted.unsettled:
                hosted.held = f"entries of it are to be run again with weights {version}: {reason}"
                log.error("session %s is left as it is: %s", hosted.session, hosted.held)
            else:
                self._change(hosted)

    def point(self, version: str, policy: str) -> bool:
        """Make a version the current one, if it is here; whether it has become so."""
        if version not in self._engine.versions or version == self.current:
            self.policy = policy if version == self.current else self.policy
            return False
        self.current, self.policy = version, policy
        return True

    def lag(self, sessions: Iterable[Hosted]) -> None:
        """Who of the sessions runs with another version than the current one is to change."""
        self._lagging = deque(h for h in sessions if h.weights != self.current)

    def unused(self, keep: Iterable[str]) -> list[str]:
        """Take those off the device that no session needs, and say which."""
        needed = {"", self.base, self.current, self.coming, *keep, *self._used}
        gone = [version for version in self._engine.versions if version not in needed]
        for version in gone:
            del self._engine.versions[version]
        return gone

    # Changing

    @property
    def lags(self) -> bool:
        """Whether a session may have to change yet."""
        return bool(self._lagging) and not (self.policy == "pin" and not self._evicted())

    def changing(self, partition: int) -> bool:
        """Whether sessions of a partition wait to change."""
        return bool(self._changing.get(partition))

    def mark(self, most: int) -> None:
        """Let up to `most` sessions wait until nothing of theirs is under way."""
        most -= sum(map(len, self._changing.values()))
        evicted = self._evicted() if self.policy == "pin" else None
        if evicted is not None and not evicted:
            self._lagging = deque(h for h in self._lagging if not h.gone)
            return
        for _ in range(len(self._lagging)):
            if most < 1:
                return
            hosted = self._lagging.popleft()
            if hosted.gone or hosted.held or hosted.halt or hosted.weights == self.current:
                continue
            if (
                hosted.unsettled
                or hosted.action
                or (evicted is not None and hosted.weights not in evicted)
            ):
                self._lagging.append(hosted)
                continue
            self._change(hosted)
            most -= 1

    def may_change(self, partition: int) -> list[Hosted]:
        """Those of a partition that can change now: nothing of them is under way."""
        return [h for h in self._changing.get(partition, ()) if self._can(h)]

    def next_of(self, hosted: Hosted) -> str:
        """The version that its next checkpoint names."""
        return self.current if hosted.halt == "change" and self._can(hosted) else hosted.weights

    def rests(self, hosted: Hosted) -> bool:
        """Whether it goes back to rest with its next checkpoint, since that changes its version."""
        return self.policy == "reset" and self.next_of(hosted) != hosted.weights

    def changed(self, hosted: Hosted, weights: str) -> None:
        """It has changed."""
        self._changing.get(hosted.partition, {}).pop(hosted, None)
        self._unuse(hosted.weights)
        self._used[weights] += 1
        hosted.weights = weights
        self.changes += 1

    def back(self) -> list[Hosted]:
        """Those that waited to change, and need not any more; they do not wait from here on."""
        found = [
            h for changing in self._changing.values() for h in changing if h.weights == self.current
        ]
        for hosted in found:
            del self._changing[hosted.partition][hosted]
        return found

    def _change(self, hosted: Hosted) -> None:
        hosted.halt = "change"
        self._changing.setdefault(hosted.partition, {})[hosted] = None

    @staticmethod
    def _can(hosted: Hosted) -> bool:
        return hosted.settled and not (hosted.in_flight or hosted.action)

    def _evicted(self) -> set[str]:
        """Versions, the oldest first, that are too many for sessions to be pinned to them."""
        used = [v for v in self._engine.versions if v in self._used and v != self.current]
        return set(used[: max(len(used) + 1 - self.most, 0)])

    def _unuse(self, version: str) -> None:
        self._used[version] -= 1
        if self._used[version] <= 0:
            del self._used[version]
