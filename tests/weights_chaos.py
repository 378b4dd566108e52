"""Chaos of weights: versions published one after another under load, with a fault beside each.

    python tests/weights_chaos.py                     20 versions, 300 sessions, 3 workers
    python tests/weights_chaos.py --seed 7            another seed

Every reply is compared, bit for bit, with what the version it names computes from the session's
state. Versions with a mistake must never be named by a reply.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from chaos import APP, ROW_COUNT, TESTS, Chaos
from serving_models import served
from slotstream import Client, Reply
from slotstream_worker.engine.engine import Engine
from slotstream_worker.weights import InUse, publish
from slotstream_worker.weights.boxes import Box
from slotstream_worker.weights.catalogue import Catalogue
from slotstream_worker.weights.manifest import Manifest, Tensor
from slotstream_worker.weights.names import chunk_key
from slotstream_worker.weights.retention import delete
from weights_kit import rows, share, variant

PATIENCE_S = 40.0


@dataclasses.dataclass
class Found:
    """The table's figures."""

    seed: int
    faults: Counter[str]
    versions: Counter[str]
    frames: int
    replies: int
    lost: int
    duplicated: int
    out_of_order: int
    errors: int
    wrong: int
    by_refused: int
    mixed: int
    changes: int
    by_version: Counter[str]
    staging: int
    seconds: float

    @property
    def right(self) -> bool:
        return not (
            self.lost or self.duplicated or self.out_of_order or self.errors or self.wrong
            or self.by_refused or self.staging
        )  # fmt: skip


class WeightsChaos(Chaos):
    """One run of one seed. A fault is a version, and what goes wrong with it."""

    def __init__(self, seed: int, *, sessions: int, rate_hz: float, workers: int = 3) -> None:
        super().__init__(seed, sessions=sessions, rate_hz=rate_hz, workers=workers)
        self.options = ("--weights-listen", "127.0.0.1:0")
        self.model = served()
        self.trees: dict[str, Any] = {}
        self.outcomes: Counter[str] = Counter()
        self.bad: set[str] = set()
        self.staging = -1
        self._number = 0
        self._todo: list[str] = []

    # Versions

    def _fault(self) -> str:
        kinds: dict[str, Callable[[str], None]] = {
            "a good version": self._good,
            "a worker killed while staging": self._killed_staging,
            "a worker killed between verify and apply": self._killed_verified,
            "the publisher killed halfway": self._killed_publisher,
            "a flipped byte in a chunk": self._flipped,
            "a missing shard": lambda v: self._mistake(v, _missing),
            "overlapping shards": lambda v: self._mistake(v, _overlapping),
            "a wrong shape": lambda v: self._mistake(v, _shape),
            "a wrong dtype": lambda v: self._mistake(v, _dtype),
            "a version deleted under a reader": self._deleted,
            "Redis restarted": self._restarted,
            "rolled back": self._rolled_back,
        }
        if not self._todo:  # each kind once, in a new order, and then again
            self._todo = list(kinds)
            self.rng.shuffle(self._todo)
        kind = self._todo.pop()
        with contextlib.suppress(AssertionError):
            self._until(lambda: self.workers.ready() >= 2, 60)
        self._number += 1
        version = f"v{self._number}"
        self.trees[version] = variant(self.model, 1000 * self.seed + self._number)
        with Client(self.url, APP, patience_s=30) as self.client:
            self.catalogue = Catalogue(self.client.link, APP)
            kinds[kind](version)
        return kind

    def _publish(self, version: str, **settings: Any) -> None:
        """From as many ranks as it happens, cut finely."""
        ranks = self.rng.choice([1, 2, 4])
        for rank in range(ranks):
            part = share(self.trees[version], "rows", rank, ranks)
            publish(self.client, part, version=version, rank=rank, ranks=ranks, wait_s=0,
                    keep=6, **settings)  # fmt: skip

    def _finely(self, version: str, **settings: Any) -> None:
        """In shards of a few numbers each, which takes a while to read."""

        def fine(leaf: Any) -> list[Any]:
            parts = max(leaf.shape[0] if leaf.ndim else 1, 1)
            return [p for k in range(parts) for p in rows(leaf, k, parts)]

        publish(self.client, jax.tree.map(fine, self.trees[version]), version=version, keep=6,
                **settings)  # fmt: skip

    def _come(self, version: str) -> None:
        """Wait until it has become of a version what was to become of it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            entry = self.catalogue.entry(version)
            if entry is None or entry.status == "refused":
                self.outcomes["refused"] += 1
                self.bad.add(version)
                return
            reports = self.catalogue.reports().values()
            if reports and all(r["current"] == version for r in reports):
                self.outcomes["applied"] += 1
                return
            time.sleep(0.05)
        said = {w: (r["current"], r["coming"]) for w, r in self.catalogue.reports().items()}
        raise AssertionError(f"seed {self.seed}: {version} does not come: {said}, "
                             f"{self.catalogue.said(version)}")  # fmt: skip

    def _good(self, version: str) -> None:
        self._publish(version)
        self._come(version)

    def _killed_staging(self, version: str) -> None:
        pid = self._pick()
        self._finely(version)
        time.sleep(self.rng.uniform(0.0, 0.35))
        self._replace(pid, version)
        self._come(version)

    def _killed_verified(self, version: str) -> None:
        """At once: everybody waits for the slowest, so that there is a time between the two."""
        pid = self._pick()
        log = self.workers.logs[pid]
        self._finely(version, at_once=True)
        self._wait(lambda: f"weights {version} are verified" in log.read_text())
        self._replace(pid, version)
        self._come(version)

    def _killed_publisher(self, version: str) -> None:
        script = (
            "import sys, jax, numpy as np\n"
            "from slotstream import Client\n"
            "from slotstream_worker.weights import publish\n"
            "from serving_models import served\n"
            "from weights_kit import variant, rows\n"
            f"tree = variant(served(), {1000 * self.seed + self._number})\n"
            "fine = lambda leaf: [p for k in range(len(leaf)) for p in rows(leaf, k, len(leaf))]\n"
            f"client = Client({self.url!r}, {APP!r})\n"
            "print('begins', flush=True)\n"
            f"publish(client, jax.tree.map(fine, tree), version={version!r}, rank=0, ranks=2)\n"
        )
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen([sys.executable, "-c", script], env=environment,
                                   stdout=subprocess.PIPE)  # fmt: skip
        try:
            assert process.stdout
            process.stdout.readline()
            self._wait(lambda: self.catalogue.entry(version) is not None)
            time.sleep(self.rng.uniform(0.0, 0.02))
        finally:
            process.kill()
            process.communicate()
        time.sleep(0.6)
        entry = self.catalogue.entry(version)
        assert entry, "it had begun"
        assert entry.status == "publishing", entry
        self.bad.add(version)
        self.outcomes["never ready"] += 1

    def _flipped(self, version: str) -> None:
        """Between the first rank's writing and the last rank's: the digest is of what was meant."""
        for rank in (0, 1):
            part = share(self.trees[version], "rows", rank, 2)
            publish(self.client, part, version=version, rank=rank, ranks=2, wait_s=0, keep=6)
            if rank == 0:
                (tensors,) = self.catalogue.parts(version).values()
                tensor = self.rng.choice([t for t in tensors if t.nbytes()])
                prefix = str(tensor.shards[0].sources[0].where["prefix"])
                key = chunk_key(APP, prefix, 0)
                raw = bytearray(self.client.link.call("GET", key))
                raw[self.rng.randrange(len(raw))] ^= 1 << self.rng.randrange(8)
                self.client.link.call("SET", key, bytes(raw))
        self._come(version)
        assert version in self.bad, "wrong bytes were taken for right"

    def _mistake(self, version: str, change: Callable[[Tensor], Tensor]) -> None:
        """As a publisher with a mistake would make it."""
        before = self.catalogue.state().current
        publish(self.client, self.trees[version], version=f"{version}-right", keep=6)
        manifest = self.catalogue.manifest(f"{version}-right")
        assert manifest
        self.trees[f"{version}-right"] = self.trees[version]
        k = self.rng.randrange(len(manifest.tensors))
        tensors = list(manifest.tensors)
        tensors[k] = change(tensors[k])
        wrong = Manifest(version, tuple(tensors), manifest.options)
        self.catalogue.begin(version, 1, 0, wrong.options, version, [])
        self.catalogue.ready(wrong)
        self._come(version)
        assert version in self.bad, f"{version} was taken; before it {before}"

    def _deleted(self, version: str) -> None:
        """Politely, which is refused; then its chunks go all the same."""
        self._finely(version)
        self._wait(lambda: self.catalogue.leases(version))
        try:
            delete(self.catalogue, version, force=True)
            raise AssertionError("the current version was deleted")
        except InUse:
            pass
        keys = [k.decode() for k in self.client.redis.scan_iter(f"{APP}:weights:chunk:{version}.*")]
        for key in self.rng.sample(keys, len(keys) // 2):
            self.client.link.call("UNLINK", key)
        with contextlib.suppress(AssertionError):
            self._come(version)
            return
        # Who had it applies it; nobody else can read it any more: back to the one before.
        self.catalogue.point(self.catalogue.before())
        self._come(self.catalogue.state().current)
        self.outcomes["rolled back"] += 1

    def _restarted(self, version: str) -> None:
        self._finely(version)
        time.sleep(self.rng.uniform(0.0, 0.4))
        self._restart_redis()
        self._come(version)

    def _rolled_back(self, version: str) -> None:
        self._publish(version)
        self._come(version)
        target = self.catalogue.before()
        self.catalogue.point(target)
        self._come(target or self.model.weights)

    def _replace(self, pid: int, version: str) -> None:
        self.workers.kill(pid, signal.SIGKILL)
        said = self.workers.logs[pid].read_text()
        when = (
            "before it was verified" if f"weights {version} are verified" not in said
            else "verified, not applied" if f"weights {version} are applied" not in said
            else "applied"
        )  # fmt: skip
        self.outcomes[f"killed {when}"] += 1
        self.workers.start()

    def _wait(self, what: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, f"seed {self.seed}: what was waited for came not"
            time.sleep(0.005)

    def _settle(self) -> None:
        """Nothing is on its way any more: staging memory is back to zero."""
        with Client(self.url, APP, patience_s=30) as client:
            catalogue = Catalogue(client.link, APP)
            time.sleep(2.5)  # the last reports
            self.staging = sum(r["staging_bytes"] for r in catalogue.reports().values())

    # The check

    def _check(self, results: dict[str, list[Reply]], seconds: float) -> Any:
        lost = duplicated = disorder = errors = mixed = changes = 0
        by_version: Counter[str] = Counter()
        for name, frames in self.pushed.items():
            got = results.get(name, [])
            ids = [reply.id for reply in got]
            lost += max(len(frames) - len(set(ids)), 0)
            duplicated += len(ids) - len(set(ids)) + max(len(set(ids)) - len(frames), 0)
            disorder += sum(a >= b for a, b in pairwise(ids))
            errors += sum(reply.error is not None for reply in got)
            runs = [key for key, _ in groupby(reply.weights for reply in got)]
            changes += len(runs) - 1
            mixed += len(set(runs)) < len(runs)
            by_version.update(str(reply.weights) for reply in got)
        return Found(
            *(self.seed, self.faults, self.outcomes, sum(map(len, self.pushed.values()))),
            *(sum(map(len, results.values())), lost, duplicated, disorder, errors),
            self._wrong(results),
            sum(by_version[version] for version in self.bad),
            *(mixed, changes, by_version, self.staging, seconds),
        )

    def _wrong(self, results: dict[str, list[Reply]]) -> int:
        """Replies that are not what the version they name computes from the session's state."""
        engine = Engine(self.model, len(self.pushed))
        engine.prepare((ROW_COUNT,))
        engine.versions[self.model.weights] = self.model.variables
        for version, tree in self.trees.items():
            engine.versions[version] = jax.tree.map(jnp.asarray, tree)
        engine.pool.admit(self.pushed)
        wrong = 0
        for k in range(max(map(len, self.pushed.values()))):
            names = [
                n for n in self.pushed if k < min(len(self.pushed[n]), len(results.get(n, ())))
            ]
            if not names:
                break
            replies = [results[name][k] for name in names]
            frames = np.stack([self.pushed[name][k] for name in names])
            weights = [str(reply.weights) for reply in replies]
            for ran in engine.run(names, frames, weights=weights):
                for row, place in enumerate(ran.positions):
                    output = replies[place].output
                    wrong += not (
                        isinstance(output, dict)
                        and all(np.array_equal(output[n], a[row]) for n, a in ran.outputs.items())
                    )
        return wrong


def _missing(tensor: Tensor) -> Tensor:
    return dataclasses.replace(tensor, shards=tensor.shards[1:])


def _overlapping(tensor: Tensor) -> Tensor:
    return dataclasses.replace(tensor, shards=(*tensor.shards, tensor.shards[0]))


def _shape(tensor: Tensor) -> Tensor:
    shape = (tensor.shape[0] + 1, *tensor.shape[1:])
    more = Box((tensor.shape[0], *[0] * (len(shape) - 1)), (1, *shape[1:]))
    extra = dataclasses.replace(tensor.shards[0], box=more)
    return dataclasses.replace(tensor, shape=shape, shards=(*tensor.shards, extra))


def _dtype(tensor: Tensor) -> Tensor:
    return dataclasses.replace(tensor, dtype="int32")


def show(console: Console, found: list[Found]) -> None:
    """Print the runs as a table, a column each."""
    table = Table(title="chaos of weights", title_justify="left")
    table.add_column("seed")
    for one in found:
        table.add_column(str(one.seed), justify="right")
    lines: list[tuple[str, Callable[[Found], Any]]] = [
        *((kind, lambda o, k=kind: o.faults[k]) for kind in sorted({k for o in found
                                                                   for k in o.faults})),
        *((f"versions {kind}", lambda o, k=kind: o.versions[k])
          for kind in ("applied", "refused", "never ready", "rolled back")),
        *((f"a worker {kind}", lambda o, k=kind: o.versions[k])
          for kind in ("killed before it was verified", "killed verified, not applied",
                       "killed applied")),
        ("frames pushed", lambda o: f"{o.frames:,}"), ("replies", lambda o: f"{o.replies:,}"),
        ("lost", lambda o: o.lost), ("duplicated", lambda o: o.duplicated),
        ("out of order", lambda o: o.out_of_order), ("errors", lambda o: o.errors),
        ("replies that are not their version's", lambda o: o.wrong),
        ("replies by refused versions", lambda o: o.by_refused),
        ("versions named by replies", lambda o: len(o.by_version)),
        ("changes of sessions", lambda o: f"{o.changes:,}"),
        ("sessions that came back to a version", lambda o: o.mixed),
        ("staging bytes at the end", lambda o: o.staging),
        ("seconds", lambda o: f"{o.seconds:.0f}"),
    ]  # fmt: skip
    for name, value in lines:
        table.add_row(name, *(str(value(one)) for one in found))
    console.print(table)


@click.command()
@click.option("--seed", type=int, multiple=True, help="Run these seeds only.")
@click.option("--versions", default=20, show_default=True, help="Versions a seed, a fault each.")
@click.option("--sessions", default=300, show_default=True)
@click.option("--workers", default=3, show_default=True)
@click.option("--rate", "rate_hz", default=1.5, show_default=True, help="Frames a second each.")
@click.option("--minutes", default=9.0, show_default=True, help="No more versions after these.")
def main(
    seed: tuple[int, ...], versions: int, sessions: int, workers: int, rate_hz: float,
    minutes: float,
) -> None:  # fmt: skip
    """Run it, print a table, and exit with 0 where everything was right."""
    console, found = Console(), []
    for one in seed or (1,):
        chaos = WeightsChaos(one, sessions=sessions, rate_hz=rate_hz, workers=workers)
        began = time.monotonic()

        def say(kind: str, number: int, began: float = began) -> None:
            console.print(f"{time.monotonic() - began:6.1f} s  {number:3}  {kind}", highlight=False)

        found.append(chaos.run(versions, 60 * minutes / len(seed or (1,)), say))
    show(console, found)
    sys.exit(0 if all(one.right for one in found) else 1)


if __name__ == "__main__":
    main()
