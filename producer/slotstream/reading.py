"""Reading replies: of one session or of many, waiting for the first."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from slotstream.arguments import LENGTHS, argument
from slotstream.endpoint import hash_slot
from slotstream.exchange import Exchange
from slotstream.ids import EntryId
from slotstream.link import Link
from slotstream.replies import Reply

STREAMS_A_READ = 512
REPLIES_A_READ = 256
"""Replies of one stream that one read takes at most."""
_POLL_S = 0.002


class Reader(Protocol):
    """Whoever takes in the replies of one session's stream.

    Attributes:
        outbox: key of its reply stream.
        asked: the same, as an argument of a command.
        position: id of the last reply read, as Redis writes it.
        trims: whether replies are deleted once they are read.
    """

    outbox: str
    asked: bytes
    position: bytes
    trims: bool

    def take(self, raw_id: bytes, raw: list[bytes], now: float) -> Reply | None:
        """Take in one entry; None for one that is not for whoever iterates over replies."""


def read_replies(
    link: Link, readers: Mapping[str, Reader], block_s: float
) -> dict[str, list[Reply]]:
    """New replies by the readers' names, waiting up to `block_s` for the first."""
    parts = _parts(link, readers)
    if len(parts) == 1:
        return _read(link, parts[0], block_s)
    # Of several reads none may wait, since the others' replies would wait with it.
    found: dict[str, list[Reply]] = {}
    for part in parts:
        found.update(_read(link, part, None))
    if not found:
        time.sleep(min(block_s, _POLL_S))
    return found


def _parts(link: Link, readers: Mapping[str, Reader]) -> list[list[tuple[str, Reader]]]:
    """Readers by what one command can read: keys of one hash slot on a cluster, not too many."""
    by_slot: dict[int, list[tuple[str, Reader]]] = defaultdict(list)
    if not link.endpoint.cluster:
        by_slot[0] = list(readers.items())
    else:
        for name, reader in readers.items():
            by_slot[hash_slot(reader.outbox)].append((name, reader))
    return [
        named[start : start + STREAMS_A_READ]
        for named in by_slot.values()
        for start in range(0, len(named), STREAMS_A_READ)
    ]


def _read(
    link: Link, named: Sequence[tuple[str, Reader]], block_s: float | None
) -> dict[str, list[Reply]]:
    packed = pack_read([reader for _, reader in named], block_s)
    by_key = {reader.outbox.encode(): (name, reader) for name, reader in named}

    def ask() -> Any:
        answers: list[Any] = []
        with Exchange(link.endpoint.pool(named[0][1].outbox)) as exchange:
            exchange.send(packed, 1)
            exchange.receive(answers)
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    found = {}
    answer = link.patiently(ask)
    now = time.perf_counter()
    for key, entries in answer or ():
        name, reader = by_key[key]
        found[name] = take(reader, entries, now)
        if reader.trims:
            trim(link, reader)
    return found


def pack_read(readers: Sequence[Reader], block_s: float | None) -> bytes:
    """An `XREAD` of what comes after the readers' positions; without `block_s` it does not wait."""
    parts = [b"*%d\r\n" % (4 + 2 * len(readers) + (0 if block_s is None else 2))]
    parts += [argument(b"XREAD"), argument(b"COUNT"), argument(b"%d" % REPLIES_A_READ)]
    if block_s is not None:
        parts += [argument(b"BLOCK"), argument(b"%d" % max(int(block_s * 1000), 1))]
    parts.append(argument(b"STREAMS"))
    parts += [reader.asked for reader in readers]
    for reader in readers:
        position = reader.position
        parts += (b"$", LENGTHS[len(position)], position, b"\r\n")
    return b"".join(parts)


def take(reader: Reader, entries: Iterable[tuple[bytes, list[bytes]]], now: float) -> list[Reply]:
    """Let a reader take in new entries of its stream; what it gives of them."""
    replies = [reader.take(id_, raw, now) for id_, raw in entries]
    return [reply for reply in replies if reply is not None]


def trim(link: Link, reader: Reader) -> None:
    """Delete what a reader has read."""
    after = EntryId.parse(reader.position).next()
    link.call("XTRIM", reader.outbox, "MINID", "=", str(after))
