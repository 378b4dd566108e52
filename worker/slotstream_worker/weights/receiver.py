"""Versions come in, in the background: one thread a worker, which looks, stages and reports.

    receiver = Receiver(config, engine, metrics)
    receiver.start()
    receiver.take()                 # versions that are verified and on the device
    receiver.goal                   # the version that is current, if it is here

The loop of the worker never waits for it: what crosses between the two are whole values.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import deque
from typing import Any

import redis

from slotstream.endpoint import passes
from slotstream.link import Link
from slotstream_worker.config import WorkerConfig
from slotstream_worker.engine.engine import Engine
from slotstream_worker.store.lease import whereabouts
from slotstream_worker.weights.canary import Canary
from slotstream_worker.weights.catalogue import Catalogue, State
from slotstream_worker.weights.errors import BadWeights, Refused
from slotstream_worker.weights.fetch import LEASE_S, Fetcher, Stopped
from slotstream_worker.weights.gauges import Gauges
from slotstream_worker.weights.holdings import Holdings
from slotstream_worker.weights.transports.peers import PeerServer
from slotstream_worker.weights.update import NEXT, Update

log = logging.getLogger(__name__)

POLL_S = 0.15
REPORT_S = 1.0
REPORT_TTL_S = 6.0
TRIES = 3
_AGAIN_S, _WAITED_S = 1.0, 3.0
_PATIENCE_S = 1.0
_REMEMBERED = 32


class Receiver:
    """The thread. Construction opens nothing and starts nothing.

    Args:
        config: of the worker.
        engine: prepared before a version with a canary is staged.
        gauges: what is counted.
    """

    def __init__(self, config: WorkerConfig, engine: Engine, gauges: Gauges) -> None:
        self.config, self.engine, self.gauges = config, engine, gauges
        self.base = engine.model.weights
        self.link = Link(config.redis, patience_s=_PATIENCE_S)
        self.catalogue = Catalogue(self.link, config.app)
        self.holdings = Holdings()
        self.goal, self.policy, self.coming = self.base, "keep", ""
        self.candidate = ""
        self.looks = 0
        """Passes over the catalogue; each that is counted has ended."""
        self.synced = threading.Event()
        """Set once the version that is current when the worker starts is here, or refused."""
        self.error: Exception | None = None
        """Why the thread could not begin, where no waiting mends it."""
        self.failed: dict[str, str] = {}
        self.updates: dict[str, Update] = {}
        self.sessions: dict[str, int] = {}
        self._wanted: dict[str, bool] = {}
        self._arrived: deque[tuple[str, Any]] = deque()
        self._passed_over: deque[tuple[str, str]] = deque()
        self._notes: deque[tuple[str, str]] = deque()
        self._again_at: dict[str, float] = {}
        # Refused since their bytes did not come; another worker may serve them yet.
        self._elsewhere: set[str] = set()
        self._reported_at = 0.0
        self._failing = False
        self._generation = 0
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._server: PeerServer | None = None
        self.fetcher = Fetcher(config, engine, self.catalogue, self.holdings, gauges, self._tick)

    # The worker's side

    def start(self) -> None:
        """Listen where that is asked for, and begin to look. Raises `OSError`, `BadWeights`."""
        if self.config.canary:
            self.fetcher.standing = Canary(self.config.canary.read_bytes(), self.engine.model)
        if self.config.weights_listen:
            host, _, port = self.config.weights_listen.rpartition(":")
            token = secrets.token_hex(16)
            self._server = PeerServer(host.strip("[]"), int(port), token, self.holdings.provide)
            self._server.start()
            self.fetcher.serves = True
        self._thread.start()

    def stop(self) -> None:
        """Stop looking, whatever is under way; give leases back where Redis can be reached."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)
        if self._server:
            self._server.stop()
        self.link.close()

    def take(self) -> list[tuple[str, Any]]:
        """Versions that have come since the last call, with their variables on the device."""
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def passed_over(self) -> list[tuple[str, str]]:
        """Versions that sessions wanted and will not come, each with why."""
        return [self._passed_over.popleft() for _ in range(len(self._passed_over))]

    def want(self, versions: dict[str, bool]) -> None:
        """Sessions wait for these versions; True where one cannot do without."""
        if versions != self._wanted:
            self._wanted = dict(versions)
            self._wake.set()

    def note(self, version: str, what: str) -> None:
        """`applied` or `released`, as the loop has seen it."""
        self._notes.append((version, what))
        self._wake.set()

    @property
    def needed(self) -> list[str]:
        """Versions that are to stay on the device whether a session names them or not."""
        return [v for v in (self.candidate, *self._wanted) if v]

    # The thread

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
                self._failing = False
            except Stopped:
                break
            except Exception as error:
                known = _passes(error)
                if not self._failing:
                    log.warning("weights cannot be looked for: %s", error, exc_info=not known)
                self._failing = True
                if not known and not self.synced.is_set():
                    self.error = error
                    self.synced.set()
                    return
            self._wake.wait(POLL_S)
            self._wake.clear()
        try:
            for version in self.holdings.versions():
                self.catalogue.unlease(version, self.config.worker)
            self.catalogue.unsay(self.config.worker)
        except (redis.RedisError, OSError) as error:
            log.info("leases on weights are left to run out: %s", error)

    def look(self) -> None:
        """One pass: see what is wanted, stage one version of it, report."""
        self._settle_notes()
        state = self.catalogue.state()
        self.candidate = state.candidate
        chosen = self._choose(state)
        if chosen:
            self._report(force=True)
            self._stage(chosen)
            state = self.catalogue.state()
        self._aim(state)
        self._answer_wanted(state)
        if state.candidate and self.holdings.has(state.candidate):
            alive = {self.config.worker, *self.catalogue.reports()}
            self.catalogue.report(state.candidate, self.config.worker, "verified", alive)
        self.looks += 1
        self._report()

    def _aim(self, state: State) -> None:
        """What is current, as far as it is here."""
        if state.generation < self._generation and not state.current:
            # Redis has lost the catalogue, and nobody has published since: nothing was rolled back.
            self.synced.set()
            return
        self._generation = state.generation
        goal = state.current or self.base
        here = goal == self.base or self.holdings.has(goal)
        self.coming = "" if here or goal in self.failed else goal
        if here:
            self.policy, self.goal = state.on_weights, goal
        if here or goal in self.failed:
            self.synced.set()

    def _choose(self, state: State) -> str:
        """The version to be staged now: what a replay needs, then what is to become current."""
        wanted = [v for v, needed in self._wanted.items() if needed or v == state.current]
        now = time.monotonic()
        for version in (*wanted, state.current, state.candidate):
            if not version or version == self.base or self.holdings.has(version):
                continue
            again = version not in self.failed or self._may_yet_come(version)
            if again and now >= self._again_at.get(version, 0.0):
                return version
        return ""

    def _may_yet_come(self, version: str) -> bool:
        """Whether a session cannot do without a version whose bytes did not come so far."""
        return version in self._elsewhere and self._wanted.get(version, False)

    def _answer_wanted(self, state: State) -> None:
        """Say which of the versions that sessions wait for will not come."""
        for version, needed in list(self._wanted.items()):
            if version == self.base or self.holdings.has(version):
                continue
            if version in self.failed and not self._may_yet_come(version):
                self._passed_over.append((version, self.failed[version]))
            elif (
                not needed
                and version not in self.failed
                and version not in (state.current, state.candidate)
            ):
                self._passed_over.append((version, "it is not the current one any more"))

    def _stage(self, version: str) -> None:
        update = self.updates.get(version)
        if update is None or update.state in ("released", "refused"):
            update = self.updates[version] = Update(version)
        while len(self.updates) > _REMEMBERED:
            self.updates.pop(next(iter(self.updates)))
        update.tries += 1
        try:
            held = self.fetcher.fetch(update)
        except Stopped:
            raise
        except Exception as error:
            if _passes(error):
                if update.state in ("planned", "staging"):
                    update.to("discovered", str(error))
                update.tries -= 1
                raise
            self._refused(update, error)
            return
        finally:
            self.gauges.update(update)
        self.failed.pop(version, None)
        self._elsewhere.discard(version)
        self.holdings.add(version, held)
        self._arrived.append((version, held.variables))
        self.catalogue.report(version, self.config.worker, "verified", ())
        self._report(force=True)  # others may read it from here now
        log.info("weights %s are verified: %s", version, json.dumps(update.seen()["seconds"]))

    def _refused(self, update: Update, error: Exception) -> None:
        """Try again what may have been the way here; say of the rest that it is wrong."""
        version, reason = update.version, str(error) or type(error).__name__
        if version in self.failed:
            self._again_at[version] = time.monotonic() + _WAITED_S
            update.to("refused", reason)
            return
        # Memory of the host or the device, say, which another worker may have.
        local = not isinstance(error, Refused | BadWeights) or (
            isinstance(error, Refused) and error.phase in ("staging", "digest", "lease")
        )
        lost = isinstance(error, Refused) and error.phase == "lease"
        if local and not lost and update.tries < TRIES:
            update.to("discovered", reason)
            self._again_at[version] = time.monotonic() + _AGAIN_S
            log.warning("weights %s: %s; tried again", version, reason)
            return
        update.to("refused", reason)
        self.failed[version] = reason
        if local and not lost:
            self._elsewhere.add(version)
            self._again_at[version] = time.monotonic() + _WAITED_S
        self.gauges.refused.inc()
        log.error("weights %s are refused: %s", version, reason)
        if lost:
            return
        candidate = version == self.candidate
        alive = self.catalogue.reports() if local and not candidate else {}
        self.catalogue.refuse(version, self.config.worker, reason, alive)
        self.catalogue.unlease(version, self.config.worker)

    def _settle_notes(self) -> None:
        while self._notes:
            version, what = self._notes[0]
            update = self.updates.get(version)
            if update and what in NEXT[update.state]:
                update.to(what)
            if what == "applied" and version != self.base:
                self.catalogue.report(version, self.config.worker, "applied", ())
            elif what == "released":
                self.holdings.drop(version)
                self.catalogue.unlease(version, self.config.worker)
            self._notes.popleft()
            self._reported_at = 0.0

    def _tick(self) -> None:
        """Between pieces of a transfer: heed a stop, renew what must not run out."""
        if self._stop.is_set():
            raise Stopped
        try:
            self._report()
        except (redis.RedisError, OSError) as error:
            if not passes(error):
                raise

    def _report(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._reported_at < REPORT_S:
            return
        self._reported_at = now
        self.gauges.staging.set(self.fetcher.staging_bytes)
        for version in self.holdings.versions():
            self.catalogue.lease(version, self.config.worker, LEASE_S)
        self.catalogue.say(self.config.worker, json.dumps(self.seen()), REPORT_TTL_S)

    def seen(self) -> dict[str, Any]:
        """This worker's report: what it holds, what it is at, what it can read."""
        server = self._server
        return {
            "where": whereabouts(),
            "current": self.goal,
            "coming": self.coming,
            "resident": {**dict.fromkeys([self.base, *self.holdings.versions()], 0),
                         **self.sessions},
            "holds": self.holdings.versions(),
            "updates": [u.seen() for u in list(self.updates.values())[-8:]],
            "plans": dict(self.fetcher.planner.counts),
            "staging_bytes": self.fetcher.staging_bytes,
            "capabilities": self.fetcher.capabilities(),
            "serves": f"{server.host}:{server.port}" if server else "",
            "token": server.token if server else "",
            "served_bytes": server.served_bytes if server else 0,
        }  # fmt: skip


def _passes(error: Exception) -> bool:
    """Whether an error is an outage, which passes by itself."""
    return isinstance(error, redis.RedisError | OSError) and passes(error)
