"""Which versions are kept: none goes that is current, read by a worker, or named by a row."""

from __future__ import annotations

import json

from slotstream.names import Keys, config_key
from slotstream_worker.weights.catalogue import Catalogue
from slotstream_worker.weights.errors import InUse, WeightsError
from slotstream_worker.weights.names import chunk_key

ROWS_A_LOOK = 512
CHUNKS_A_DELETE = 16


def delete(catalogue: Catalogue, version: str, *, force: bool = False) -> None:
    """Delete a version that nobody needs.

    Raises:
        InUse: it is current, leased, or named by a session's row; `force` minds only the first.
        WeightsError: there is no such version.
    """
    outcome, detail = catalogue.do("delete", version, "force" if force else "")
    if outcome == "gone":
        raise WeightsError(f"there is no version {version}")
    if outcome == "current":
        raise InUse(f"version {version} is the current one; roll back to another first")
    if outcome == "leased":
        raise InUse(f"version {version} is held by {detail}; wait, or say --force")
    if not force and (named := named_by(catalogue, version)):
        catalogue.do("undelete", version)
        raise InUse(
            f"version {version} is named by {len(named)} sessions ({', '.join(named[:3])}), "
            "whose replay needs it; they move on at their next checkpoint"
        )
    flat = catalogue.link.call("HGETALL", catalogue.key(version, "written"))
    keys = [
        chunk_key(catalogue.app, prefix, k)
        for raw in flat[1::2]
        for prefix, count in json.loads(raw)
        for k in range(count)
    ]
    for start in range(0, len(keys), CHUNKS_A_DELETE):
        # UNLINK: a delete of many MiB would hold Redis.
        catalogue.link.calls([("UNLINK", key) for key in keys[start : start + CHUNKS_A_DELETE]])
    catalogue.do("forget", version)


def prune(catalogue: Catalogue, keep: int, *, stale_s: float = 3600.0) -> list[str]:
    """Delete all but the newest `keep` versions, and publications that came to nothing.

    What is current, leased, or named by a session's row stays.
    """
    entries = catalogue.entries()
    settled = [e.version for e in entries if e.status == "ready"]
    seconds, micros = catalogue.link.call("TIME", key=catalogue.prefix + "state")
    now_ms = 1000 * int(seconds) + int(micros) // 1000
    old = {*(settled[:-keep] if keep else settled)}
    gone = []
    for entry in entries:
        stale = entry.status != "ready" and now_ms - entry.touched_ms >= 1000 * stale_s
        if entry.version in old or stale or entry.status == "deleting":
            try:
                delete(catalogue, entry.version)
                gone.append(entry.version)
            except WeightsError:
                continue
    return gone


def named_by(catalogue: Catalogue, version: str) -> list[str]:
    """Sessions whose rows name a version, those set aside among them."""
    raw = catalogue.link.call("HGET", config_key(catalogue.app), "partitions")
    found = []
    for keys in (Keys(catalogue.app, p) for p in range(int(raw or 1))):
        for members, kind in ((keys.sessions, "slot"), (keys.aside, "aside")):
            names = sorted(catalogue.link.call("SMEMBERS", members))
            for start in range(0, len(names), ROWS_A_LOOK):
                part = names[start : start + ROWS_A_LOOK]
                answers = catalogue.link.calls(
                    [("HGET", f"{keys.prefix}{kind}:{n.decode()}", "weights") for n in part]
                )
                found += [
                    n.decode()
                    for n, answer in zip(part, answers, strict=True)
                    if answer == version.encode()
                ]
    return found
