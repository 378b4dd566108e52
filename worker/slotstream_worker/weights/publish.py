"""Publishing a version: from a trainer's loop, from several ranks at once, from a file.

    from slotstream_worker.weights import publish
    publish(client, variables, version="step-1200")              # one process, all of it
    publish(client, pieces, version="step-1200", rank=2, ranks=4)   # each rank what it owns

A version becomes ready in one step, once every rank's bytes are there and hold every element of
every tensor exactly once; until then nobody sees it. Needs no device.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slotstream.client import Client
from slotstream_worker.weights.catalogue import Catalogue
from slotstream_worker.weights.digests import digest
from slotstream_worker.weights.errors import BadWeights, Incomplete
from slotstream_worker.weights.formats import read_weights
from slotstream_worker.weights.manifest import Manifest, Options, Shard, assemble
from slotstream_worker.weights.names import check_version
from slotstream_worker.weights.pieces import Piece, bytes_of, leaves_of, pieces_of, tensor_of
from slotstream_worker.weights.retention import prune
from slotstream_worker.weights.writers import ChunkWriter, FileWriter, InPlace, Writer

_POLL_S = 0.02


def publish(
    client: Client,
    variables: Any,
    *,
    version: str,
    rank: int = 0,
    ranks: int = 1,
    on_weights: str = "keep",
    at_once: bool = False,
    cast: bool = False,
    extra: bool = False,
    canary: bytes | None = None,
    folder: Path | None = None,
    keep: int = 4,
    wait_s: float = 60.0,
) -> Manifest | None:
    """Publish a version, or one rank's part of it.

    Args:
        client: whose app it is for.
        variables: any tree of arrays (NumPy, JAX or what NumPy can read), or of `Piece`; of a JAX
            array the shards of this process are published, each replica once.
        version: its name, new for each.
        rank: which of the ranks this is.
        ranks: how many publish it together; all say the same.
        on_weights: what becomes of the sessions' states: `keep`, `reset` to rest, or `pin` (a
            session finishes on the version it began with).
        at_once: no worker applies it before all have verified it.
        cast: a dtype may be changed with a loss where the model has another.
        extra: tensors that the model has no leaf for are passed over.
        canary: an .npz of recorded frames (see `canary`).
        folder: write files there, on a path that the workers see, instead of chunks in Redis.
        keep: older versions beyond so many are deleted, where nobody needs them; 0 for none.
        wait_s: how long to wait for the other ranks; 0 for not at all.

    Returns:
        The manifest, or None where other ranks are not done and are not waited for.

    Raises:
        BadWeights: the version exists already, or is not whole; it is not published then.
        Incomplete: the other ranks did not finish in time.
    """
    pieces = {name: list(pieces_of(name, leaf)) for name, leaf in leaves_of(variables).items()}
    options = Options(on_weights, at_once, cast, extra, canary is not None)
    work = _Publication(client, check_version(version), rank, ranks, options, canary)
    writer = (
        ChunkWriter(client, work.nonce)
        if folder is None
        else FileWriter(folder, version, work.nonce)
    )
    manifest = work.run(pieces, writer, wait_s)
    if manifest is not None and keep:
        prune(work.catalogue, keep)
    return manifest


def publish_file(client: Client, path: Path, *, version: str, in_place: bool = False,
                 **settings: Any) -> Manifest | None:  # fmt: skip
    """Publish what a file or folder holds (see `formats`); the rest as `publish`.

    `in_place`: the workers read the safetensors files themselves, from this very path.
    """
    found = read_weights(path)
    if not in_place:
        return publish(client, dict(found.arrays), version=version, **settings)
    if set(found.places) != set(found.arrays):
        raise BadWeights(
            f"{path} is {found.kind}, whose tensors do not lie in the file as they are; only "
            "safetensors can be read in place. Leave --in-place out, or give --folder"
        )
    keep, wait_s = settings.pop("keep", 4), settings.pop("wait_s", 60.0)
    canary, folder = settings.pop("canary", None), settings.pop("folder", None)
    if folder is not None:
        raise BadWeights("in place means that no files are written; leave one of the two out")
    rank, ranks = settings.pop("rank", 0), settings.pop("ranks", 1)
    options = Options(canary=canary is not None, **settings)
    work = _Publication(client, check_version(version), rank, ranks, options, canary)
    pieces = {
        name: [Piece(array, array.shape, (0,) * array.ndim)] for name, array in found.arrays.items()
    }
    manifest = work.run(pieces, InPlace(found.places), wait_s)
    if manifest is not None and keep:
        prune(work.catalogue, keep)
    return manifest


class _Publication:
    """One rank's part in publishing one version."""

    def __init__(
        self, client: Client, version: str, rank: int, ranks: int, options: Options,
        canary: bytes | None,
    ) -> None:  # fmt: skip
        if not 0 <= rank < ranks:
            raise BadWeights(f"rank is 0 to {ranks - 1} of {ranks} ranks, got {rank}")
        self.catalogue = Catalogue(client.link, client.app.name)
        self.version, self.rank, self.ranks, self.options = version, rank, ranks, options
        self.nonce = f"{version}.{rank}.{secrets.token_hex(4)}"
        self._canary = canary

    def run(
        self, pieces: Mapping[str, list[Piece]], writer: Writer, wait_s: float
    ) -> Manifest | None:
        """Write the bytes, then say that they are there, then see whether all is."""
        described = [tensor_of(name, parts) for name, parts in pieces.items() if parts]
        planned = writer.plan(described)
        self.catalogue.begin(self.version, self.ranks, self.rank, self.options, self.nonce, planned)
        if self._canary is not None:
            self.catalogue.write_canary(self.version, self._canary)
        tensors = []
        for tensor in described:
            shards = []
            for piece, shard in zip(pieces[tensor.name], tensor.shards, strict=True):
                data = bytes_of(piece.array)
                source = writer.write(tensor, shard, data)
                shards.append(Shard(shard.box, digest(data), (source,)))
            tensors.append(replace(tensor, shards=tuple(shards)))
        writer.finish()
        self.catalogue.register(self.version, self.rank, tensors)
        return self._complete(wait_s)

    def _complete(self, wait_s: float) -> Manifest | None:
        """Assemble the manifest once every rank is done. Whoever sees that does it."""
        deadline = time.monotonic() + wait_s
        while True:
            entry = self.catalogue.entry(self.version)
            if entry is None or entry.status not in ("publishing", "ready"):
                raise BadWeights(
                    f"version {self.version} has been given up: "
                    + (f"{entry.status}, {entry.reason}" if entry else "it was deleted")
                )
            if entry.status == "ready":
                return self.catalogue.manifest(self.version)
            parts = self.catalogue.parts(self.version)
            if len(parts) == self.ranks:
                try:
                    manifest = assemble(
                        self.version, [parts[r] for r in sorted(parts)], self.options
                    )
                except BadWeights as error:
                    self.catalogue.refuse(self.version, f"rank {self.rank}", str(error))
                    raise
                self.catalogue.ready(manifest)
                return manifest
            if time.monotonic() > deadline:
                if not wait_s:
                    return None
                missing = sorted(set(range(self.ranks)) - set(parts))
                raise Incomplete(
                    f"version {self.version} is not complete after {wait_s:g} s: of {self.ranks} "
                    f"ranks these have not published: {', '.join(map(str, missing[:16]))}. It "
                    "becomes ready when they have"
                )
            time.sleep(_POLL_S)
