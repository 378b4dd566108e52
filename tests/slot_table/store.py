"""A Redis for the tests of the slot table: its scripts, for several workers, and what it holds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

import msgpack

from slotstream.arguments import Arg
from slotstream.endpoint import Endpoint
from slotstream.ids import EntryId
from slotstream.lines import Line, Script
from slotstream.names import Keys
from slotstream_worker.store.luascripts import script
from slotstream_worker.store.table import SlotTable

TOP = 2**64 - 1
KEYS = Keys("demo")
SESSIONS = ("a", "a/1", "B.:-")
WORKERS = ("x.1", "x.2", "y.1")
KINDS = ("slot", "in", "out", "aside", "aside-in")
RETENTION = 5
"""Small, so that sessions that wait for their reader pause; `MAXLEN ~` trims nothing so short."""
TTL_S = 3600.0
CANCEL = Script("cancel", (files("slotstream") / "cancel.lua").read_text())

Fields = dict[str, str]


def key(kind: str, session: str) -> str:
    return f"{KEYS.prefix}{kind}:{session}"


def pairs(flat: Sequence[bytes]) -> Fields:
    """An entry's fields as text; of an error only its code."""
    found = dict(zip(flat[::2], flat[1::2], strict=True))
    if b"error" in found:
        found[b"error"] = msgpack.unpackb(found[b"error"])["code"].encode()
    return {name.decode(): value.decode() for name, value in found.items()}


def error(code: str) -> bytes:
    packed = msgpack.packb({"code": code, "message": ""})
    assert isinstance(packed, bytes)
    return packed


class Watched(Line):
    """A line that notes which keys each script was given."""

    declared: set[str]

    def send_script(self, script: Script, keys: Sequence[Arg], *rest: Any, **how: Any) -> None:
        self.declared.update(map(str, keys))
        super().send_script(script, keys, *rest, **how)


class Store:
    """One Redis, and a connection for each worker and for the test itself."""

    def __init__(self, url: str) -> None:
        pool = Endpoint(url, name="test").pool(KEYS.control)
        self.line = Line(pool)
        self.lines = {worker: Watched(pool) for worker in WORKERS}
        self.declared: set[str] = set()
        for line in self.lines.values():
            line.declared = self.declared

    def table(
        self,
        worker: str = WORKERS[0],
        *,
        max_attempts: int = 3,
        declares: bool = False,
        retention: int = RETENTION,
    ) -> SlotTable:
        return SlotTable(self.lines[worker], KEYS, worker, reply_ttl_s=TTL_S, retention=retention,
                         max_attempts=max_attempts, declares=declares)  # fmt: skip

    def retry(self, session: str, epoch: Arg | None = None, what: str = "retry") -> str:
        """As the command `slotstream retry` calls it; `epoch` is by default that of the row."""
        names = [KEYS.control, *KEYS.shared(), *KEYS.of(session)]
        if epoch is None:
            epoch = self.line.call("HGET", key("aside", session), "epoch") or b""
        answer: bytes = self.lines[WORKERS[0]].script(
            script("retry"), names, [KEYS.prefix, 0, 0, 3, session, epoch, what]
        )
        return answer.decode()

    def cancel(self, session: str, entry: EntryId) -> int:
        """As `App.cancel` calls it."""
        names = [KEYS.row(session), KEYS.inbox(session)]
        return int(self.lines[WORKERS[0]].script(CANCEL, names, [str(entry)]))

    def lease(self, *workers: str) -> None:
        """These workers count as alive, and only these."""
        self.line.calls([("DEL", KEYS.lease(worker)) for worker in WORKERS])
        for worker in workers:
            self.line.calls([("SADD", KEYS.workers, worker), ("SET", KEYS.lease(worker), "here")])

    def close(self) -> None:
        for line in (self.line, *self.lines.values()):
            line.close()


# What Redis holds


def as_bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value


def read(line: Line) -> dict[str, Any]:
    """All that Redis holds of the partition."""
    per_session = [
        (("HGETALL", key(kind, s)) if kind in ("slot", "aside")
         else ("XRANGE", key(kind, s), "-", "+"))
        for s in SESSIONS for kind in KINDS
    ]  # fmt: skip
    expiry = [("PTTL", key(kind, s)) for s in SESSIONS for kind in ("slot", "out")]
    owned = [("SMEMBERS", KEYS.owned(worker)) for worker in WORKERS]
    answers = iter(line.calls([
        ("ZRANGE", KEYS.waiting, 0, -1), ("SMEMBERS", KEYS.sessions), ("SMEMBERS", KEYS.workers),
        ("SMEMBERS", KEYS.aside), ("XRANGE", KEYS.control, "-", "+"), ("KEYS", "*"),
        *per_session, *expiry, *owned,
    ]))  # fmt: skip
    found: dict[str, Any] = {
        "queue": [raw.decode() for raw in next(answers)],
        "sessions": names(next(answers)), "workers": names(next(answers)),
        "aside": names(next(answers)), "control": stream(next(answers)),
        "keys": names(next(answers)) - {KEYS.epoch},
    }  # fmt: skip
    for command in per_session:
        found[command[1]] = stream(next(answers)) if command[0] == "XRANGE" else row(next(answers))
    for session in SESSIONS:
        ttls = (next(answers), next(answers))
        assert all(ttl < 0 or TTL_S * 900 < ttl <= TTL_S * 1000 for ttl in ttls)
        found[f"expire {session}"] = tuple(ttl > 0 for ttl in ttls)
    for worker in WORKERS:
        found[f"owned {worker}"] = names(next(answers))
    return found


def names(raws: Iterable[bytes]) -> set[str]:
    return {raw.decode() for raw in raws}


def stream(raws: Sequence[tuple[bytes, list[bytes]]]) -> dict[EntryId, Fields]:
    return {EntryId.parse(entry): pairs(fields) for entry, fields in raws}


def row(flat: Sequence[bytes]) -> dict[str, Any]:
    found: dict[str, Any] = pairs(flat)
    if "skipped" in found:
        found["skipped"] = found["skipped"].split()
        found = {"trial": "0", "mark": "", "replies": "", **found}  # absent: the same
        assert 0 < int(found.pop("opened")) <= time.time() + 5
    if "at" in found:
        assert 0 < int(found.pop("set_aside")) <= time.time() + 5
    return found
