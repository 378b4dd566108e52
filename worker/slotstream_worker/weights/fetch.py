"""One version from the catalogue to the device: lease, plan, stage, verify, canary, place."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from slotstream.endpoint import Endpoint
from slotstream_worker.config import WorkerConfig
from slotstream_worker.engine.engine import Engine
from slotstream_worker.weights.canary import Canary
from slotstream_worker.weights.catalogue import Catalogue
from slotstream_worker.weights.errors import BadWeights, Refused, WeightsError
from slotstream_worker.weights.formats import FORMATS
from slotstream_worker.weights.gauges import Gauges
from slotstream_worker.weights.holdings import Held, Holdings
from slotstream_worker.weights.layout import Layout, state_difference
from slotstream_worker.weights.manifest import Manifest
from slotstream_worker.weights.plan import Planner
from slotstream_worker.weights.staging import Staging
from slotstream_worker.weights.transports import Chunks, Paths, Peers, Transport
from slotstream_worker.weights.transports.peers import Peer
from slotstream_worker.weights.update import Update

LEASE_S = 30.0
SEED_TTL_S = 5.0
PEERS_WAIT_S = 60.0
"""How long a worker waits for another to have read a version, before it reads for itself."""
_PEERS_POLL_S = 0.05
_TICK_S = 0.5


class Stopped(WeightsError):
    """The worker stops while a version is on its way."""


class Fetcher:
    """Fetches versions for one engine, one at a time."""

    def __init__(
        self, config: WorkerConfig, engine: Engine, catalogue: Catalogue, holdings: Holdings,
        gauges: Gauges, tick: Callable[[], None],
    ) -> None:  # fmt: skip
        self.config, self.engine, self.catalogue = config, engine, catalogue
        self.holdings, self.gauges, self._tick = holdings, gauges, tick
        self.layout = Layout.of(engine.model.variables)
        self.planner = Planner(self.layout, partial(state_difference, engine.model))
        self.standing: Canary | None = None
        self.serves = False
        self.staging_bytes = 0
        self._ticked_at = 0.0
        self._seeding = ""

    def capabilities(self) -> list[dict[str, Any]]:
        """What this worker can read: for each method its sources, artifact and payload formats."""
        described: list[dict[str, Any]] = [
            {"method": "chunks", "source": Chunks.kind, "artifact": Chunks.artifact},
            {"method": "paths", "source": Paths.kind, "artifact": Paths.artifact},
            {"method": "peers", "source": Peers.kind, "artifact": Peers.artifact,
             "serves": self.serves},
        ]  # fmt: skip
        return [{**one, "payload": ["raw little-endian"], "published_from": list(FORMATS)}
                for one in described]  # fmt: skip

    def fetch(self, update: Update) -> Held:
        """Bring a version onto the device; nothing of it is used by a session yet.

        Raises:
            Refused, BadWeights: it is wrong, or cannot be had.
            Stopped: the worker stops.
        """
        version = update.version
        outcome = self.catalogue.lease(version, self.config.worker, LEASE_S)
        if outcome != "ok":
            said = "not in the catalogue" if outcome == "gone" else outcome
            raise Refused("lease", f"version {version} is {said}")
        with update.spans.span("plan"):
            manifest = self.catalogue.manifest(version)
            if manifest is None:
                raise Refused("lease", f"version {version} has gone from the catalogue")
            plan, update.plan = self.planner.plan(manifest)
        self.gauges.planned(update.plan)
        update.nbytes = plan.nbytes
        if update.state == "discovered":
            update.to("planned")
        canaries = self._canaries(manifest)
        transports = self._transports(manifest)
        update.to("staging")
        staging = Staging(manifest, plan, self.layout, limit_bytes=self.config.staging_bytes)
        staging.spans = update.spans
        self.staging_bytes = staging.nbytes
        self.gauges.staging.set(self.staging_bytes)
        try:
            staging.run(transports, self._beat)
            variables = staging.place()
            with update.spans.span("canary"):
                for canary in canaries:
                    canary.check(self.engine, variables)
        finally:
            update.moved = dict(staging.moved_bytes)
            staging.release()
            self.staging_bytes = 0
            self.gauges.staging.set(0)
            self._seeding = ""
            for transport in transports:
                transport.close()
        update.to("verified")
        return Held.of(manifest, plan.leaf_of, variables)

    def _canaries(self, manifest: Manifest) -> list[Canary]:
        found = [self.standing] if self.standing else []
        if manifest.options.canary:
            raw = self.catalogue.canary(manifest.version)
            if raw is None:
                raise Refused("planned", f"version {manifest.version} names a canary, and none is "
                                         "stored beside it")  # fmt: skip
            try:
                found.append(Canary(raw, self.engine.model))
            except BadWeights as error:
                raise Refused("planned", str(error)) from error
        return found

    def _transports(self, manifest: Manifest) -> list[Transport]:
        """Ways to the bytes, the best first.

        Where workers serve one another, one of them reads from Redis and the others from those that
        have: N workers do not read N times.
        """
        chunks = Chunks(Endpoint(self.config.redis, name="slotstream-weights"), self.config.app)
        kinds = {s.kind for t in manifest.tensors for shard in t.shards for s in shard.sources}
        if kinds == {Paths.kind}:
            return [Paths(), chunks]
        deadline = time.monotonic() + PEERS_WAIT_S
        while True:
            peers, others = self._peers(manifest.version)
            if peers:
                find = partial(self._peers_of, manifest.version)
                return [Peers(manifest.version, find), Paths(), chunks]
            if not (others and self.serves) or time.monotonic() > deadline:
                return [Paths(), chunks]
            if self.catalogue.seeds(manifest.version, self.config.worker, SEED_TTL_S):
                self._seeding = manifest.version
                return [Paths(), chunks]
            self._tick()
            time.sleep(_PEERS_POLL_S)

    def _peers(self, version: str) -> tuple[list[Peer], bool]:
        """Workers that serve a version, in any order; whether any other worker serves at all."""
        found, others = [], False
        for worker, report in self.catalogue.reports().items():
            if worker == self.config.worker or not report.get("serves"):
                continue
            others = True
            if version in report["holds"]:
                host, _, port = report["serves"].rpartition(":")
                found.append(Peer(worker, host, int(port), report["token"]))
        random.shuffle(found)
        return found, others

    def _peers_of(self, version: str) -> list[Peer]:
        return self._peers(version)[0]

    def _beat(self) -> None:
        """Now and then while bytes come: the leases last, and a stop is heeded."""
        now = time.monotonic()
        if now - self._ticked_at < _TICK_S:
            return
        self._ticked_at = now
        self._tick()
        if self._seeding:
            self.catalogue.seeds(self._seeding, self.config.worker, SEED_TTL_S)
