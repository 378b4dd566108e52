"""The catalogue of an app's versions in Redis: what was published, what is current, who holds what.

    <app>:weights:{<app>}:state        hash: current, generation, candidate, on_weights
    ...:versions, ...:history          sorted set of names by age; list of those that were current
    ...:v:<version>                    hash: status, manifest, bytes, fingerprint, reason
    ...:v:<version>:parts|written|leases|workers|canary|seed
    ...:workers, ...:worker:<worker>   who reports, and what (JSON, expires)
    <app>:weights:chunk:<prefix>:<k>   bytes

Every change is one script, safe to repeat.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from slotstream.link import Link
from slotstream_worker.weights.errors import BadWeights
from slotstream_worker.weights.manifest import Manifest, Options, Tensor, decode_part, encode_part
from slotstream_worker.weights.names import catalogue_prefix, check_version


@cache
def _script() -> str:
    return (files("slotstream_worker.weights") / "catalogue.lua").read_text()


@dataclass(frozen=True)
class State:
    """Which version is current ('' for what the workers were started with), and what is coming.

    `candidate` waits until every worker has verified it. `generation` rises with each change.
    """

    current: str = ""
    candidate: str = ""
    on_weights: str = "keep"
    generation: int = 0


@dataclass(frozen=True)
class Entry:
    """One version as the catalogue has it."""

    version: str
    status: str
    nbytes: int = 0
    reason: str = ""
    fingerprint: str = ""
    created_ms: int = 0
    touched_ms: int = 0
    ready_ms: int = 0
    ranks: int = 1
    on_weights: str = "keep"


class Catalogue:
    """An app's versions. Each call is one command or a few, repeated through a short outage."""

    def __init__(self, link: Link, app: str) -> None:
        self.link, self.app = link, app
        self.prefix = catalogue_prefix(app)

    # Reading

    def state(self) -> State:
        """What is current."""
        raw = self.link.call("HMGET", self.prefix + "state", "current", "candidate", "on_weights",
                             "generation")  # fmt: skip
        current, candidate, policy, generation = ((v or b"").decode() for v in raw)
        return State(current, candidate, policy or "keep", int(generation or 0))

    def entries(self) -> list[Entry]:
        """All versions, the oldest first."""
        names = self.link.call("ZRANGE", self.prefix + "versions", 0, -1)
        found = [self.entry(raw.decode()) for raw in names]
        return [entry for entry in found if entry is not None]

    def entry(self, version: str) -> Entry | None:
        """One version; None where there is none of that name."""
        fields = ("status", "bytes", "reason", "fingerprint", "created", "touched", "ready",
                  "ranks", "on_weights")  # fmt: skip
        raw = self.link.call("HMGET", self.key(version), *fields)
        status, nbytes, reason, fingerprint, created, touched, ready, ranks, policy = (
            (v or b"").decode() for v in raw
        )
        if not status:
            return None
        times = (int(created or 0), int(touched or 0), int(ready or 0))
        return Entry(version, status, int(nbytes or 0), reason, fingerprint, *times,
                     int(ranks or 1), policy or "keep")  # fmt: skip

    def manifest(self, version: str) -> Manifest | None:
        """A version's manifest; None where it is not ready. Raises `BadWeights`."""
        status, raw = self.link.call("HMGET", self.key(version), "status", "manifest")
        return Manifest.decode(raw) if raw and status == b"ready" else None

    def leases(self, version: str) -> list[str]:
        """Who holds a lease on a version, those that have run out among them."""
        return [
            raw.decode() for raw in self.link.call("ZRANGE", self.key(version, "leases"), 0, -1)
        ]

    def said(self, version: str) -> dict[str, str]:
        """What each worker has come to with a version: `verified`, `applied`, `refused: ...`."""
        flat = iter(self.link.call("HGETALL", self.key(version, "workers")))
        return {k.decode(): v.decode() for k, v in zip(flat, flat, strict=True)}

    def canary(self, version: str) -> bytes | None:
        """The recorded frames stored beside a version."""
        raw: bytes | None = self.link.call("GET", self.key(version, "canary"))
        return raw

    # Publishing

    def begin(
        self, version: str, ranks: int, rank: int, options: Options, nonce: str,
        chunks: Iterable[tuple[str, int]],
    ) -> None:  # fmt: skip
        """Say that a rank is about to write chunks (prefix, how many) of a version.

        Raises:
            BadWeights: the version exists already, or another rank says otherwise.
        """
        outcome, detail = self.do(
            "begin", check_version(version), ranks, rank, json.dumps(options.__dict__), nonce,
            json.dumps(list(chunks)),
        )  # fmt: skip
        if outcome == "taken":
            raise BadWeights(
                f"there is a version {version} already ({detail}), and a version never changes; "
                "publish under another name"
            )
        if outcome == "differs":
            raise BadWeights(
                f"version {version} is being published by {detail}; rank {rank} says {ranks} "
                f"ranks, {json.dumps(options.__dict__)}. All ranks say the same"
            )

    def write_canary(self, version: str, raw: bytes) -> None:
        """Store recorded frames beside a version that is being published."""
        self.link.call("SET", self.key(version, "canary"), raw)

    def register(self, version: str, rank: int, tensors: Sequence[Tensor]) -> None:
        """Say that all of a rank's bytes are there."""
        outcome, detail = self.do("register", version, rank, encode_part(tensors))
        if outcome != "ok":
            raise BadWeights(
                f"version {version} has become {detail or 'nothing'} while rank {rank} wrote its "
                "shards; publish under another name"
            )

    def parts(self, version: str) -> dict[int, tuple[Tensor, ...]]:
        """The parts of the ranks that are done."""
        flat = iter(self.link.call("HGETALL", self.key(version, "parts")))
        return {int(k): decode_part(v) for k, v in zip(flat, flat, strict=True)}

    def ready(self, manifest: Manifest) -> None:
        """Make a version known, and current (or, at once, a candidate), in one step."""
        outcome, detail = self.do(
            "ready", manifest.version, manifest.encode(), manifest.nbytes, manifest.fingerprint,
            manifest.content, manifest.options.on_weights, int(manifest.options.at_once),
        )  # fmt: skip
        if outcome != "ok":
            raise BadWeights(f"version {manifest.version} is {detail or 'gone'} already")

    # Workers

    def lease(self, version: str, holder: str, ttl_s: float) -> str:
        """Hold a version for `ttl_s`; `ok`, or what it is instead (`gone`, `refused`, ...)."""
        outcome, detail = self.do("lease", version, holder, int(1000 * ttl_s))
        return f"{outcome}: {detail}" if detail else outcome

    def unlease(self, version: str, holder: str) -> None:
        """Hold it no longer."""
        self.do("unlease", version, holder)

    def refuse(self, version: str, worker: str, reason: str, alive: Iterable[str] = ()) -> bool:
        """Say that a version is wrong; whether it is now refused for everybody.

        It is not where another worker serves it, and where `alive` is given, not before all of
        those have refused it: then something may be wrong with this worker, or its way.
        """
        return self.do("refuse", version, reason[:2000], worker, *alive)[0] == "ok"

    def report(self, version: str, worker: str, what: str, alive: Iterable[str]) -> bool:
        """Say how far a worker is with a version; whether it may be applied."""
        return self.do("report", version, worker, what, *alive)[0] == "go"

    def seeds(self, version: str, worker: str, ttl_s: float) -> bool:
        """Whether this worker is the one that reads a version from its source, for `ttl_s`."""
        key = self.key(version, "seed")
        taken = self.link.call("SET", key, worker, "PX", int(1000 * ttl_s), "NX")
        return taken is not None or self.link.call("GET", key) == worker.encode()

    def say(self, worker: str, text: str, ttl_s: float) -> None:
        """A worker's report, for people and for other workers; gone with it."""
        self.link.calls([
            ("SET", f"{self.prefix}worker:{worker}", text, "PX", int(1000 * ttl_s)),
            ("SADD", self.prefix + "workers", worker),
        ])  # fmt: skip

    def unsay(self, worker: str) -> None:
        """The worker leaves."""
        self.link.calls([
            ("DEL", f"{self.prefix}worker:{worker}"), ("SREM", self.prefix + "workers", worker),
        ])  # fmt: skip

    def reports(self) -> dict[str, dict[str, Any]]:
        """What every worker that is alive reports."""
        names = sorted(self.link.call("SMEMBERS", self.prefix + "workers"))
        raws = self.link.calls([("GET", f"{self.prefix}worker:{n.decode()}") for n in names])
        dead = [name for name, raw in zip(names, raws, strict=True) if raw is None]
        if dead:
            self.link.call("SREM", self.prefix + "workers", *dead)
        return {n.decode(): json.loads(raw) for n, raw in zip(names, raws, strict=True) if raw}

    # Operators

    def point(self, version: str, on_weights: str = "keep") -> None:
        """Make a version current ('' for what the workers were started with)."""
        Options(on_weights)
        if self.do("point", version, on_weights)[0] != "ok":
            entry = self.entry(version)
            known = ", ".join(e.version for e in self.entries() if e.status == "ready") or "none"
            why = f"is {entry.status} ({entry.reason})" if entry else "does not exist"
            raise BadWeights(f"version {version} {why}; versions that are ready: {known}")

    def before(self) -> str:
        """The version that was current before the present one, and still can be."""
        raw = self.link.call("LRANGE", self.prefix + "history", 0, -1)
        now = self.state().current
        names: list[str] = [value.decode() for value in raw]
        for name in reversed(names):
            if name != now:
                entry = self.entry(name) if name else None
                if not name or (entry and entry.status == "ready"):
                    return name
        return ""

    def key(self, version: str, part: str = "") -> str:
        """Key of a version, or of one of its parts."""
        return f"{self.prefix}v:{version}" + (f":{part}" if part else "")

    def do(self, what: str, version: str, *args: Any) -> tuple[str, str]:
        """Run the catalogue's script; its outcome and what more there is to say."""
        answer = self.link.call("EVAL", _script(), 1, self.prefix + "state", what, version, *args)
        outcome, detail = (str(raw.decode()) for raw in answer)
        return outcome, detail
