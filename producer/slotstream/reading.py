"""Reading replies: of one session or of many, waiting for the first."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from slotstream.endpoint import hash_slot
from slotstream.ids import EntryId
from slotstream.link import Link
from slotstream.replies import Reply

_STREAMS_A_READ = 512
_REPLIES_A_READ = 256
_POLL_S = 0.002


class Reader(Protocol):
    """Whoever takes in the replies of one session's stream."""

    @property
    def outbox(self) -> str:
        """Key of its reply stream."""

    @property
    def read_to(self) -> EntryId:
        """Id of the last reply read."""

    @property
    def trims(self) -> bool:
        """Whether replies are deleted once they are read."""

    def take(self, raw_id: bytes, raw: list[bytes]) -> Reply | None:
        """Take in one entry; None for one that is not for whoever iterates over replies."""


def read_replies(
    link: Link, readers: Mapping[str, Reader], block_s: float
) -> dict[str, list[Reply]]:
    """New replies by the readers' names, waiting up to `block_s` for the first."""
    parts = _parts(link, readers)
    if len(parts) == 1:
        return _read(link, readers, parts[0], block_s)
    # Of several reads none may wait, since the others' replies would wait with it.
    found: dict[str, list[Reply]] = {}
    for part in parts:
        found.update(_read(link, readers, part, None))
    if not found:
        time.sleep(min(block_s, _POLL_S))
    return found


def _parts(link: Link, readers: Mapping[str, Reader]) -> list[list[str]]:
    """Readers by what one command can read: keys of one hash slot on a cluster, not too many."""
    by_slot: dict[int, list[str]] = defaultdict(list)
    for name, reader in readers.items():
        by_slot[hash_slot(reader.outbox) if link.endpoint.cluster else 0].append(name)
    return [
        names[start : start + _STREAMS_A_READ]
        for names in by_slot.values()
        for start in range(0, len(names), _STREAMS_A_READ)
    ]


def _read(
    link: Link, readers: Mapping[str, Reader], names: Sequence[str], block_s: float | None
) -> dict[str, list[Reply]]:
    by_key = {readers[name].outbox.encode(): name for name in names}
    wait = () if block_s is None else ("BLOCK", max(int(block_s * 1000), 1))
    ids = [str(readers[name].read_to) for name in names]
    answer = link.call("XREAD", "COUNT", _REPLIES_A_READ, *wait, "STREAMS", *by_key, *ids)
    found = {}
    for key, entries in answer or ():
        reader = readers[by_key[key]]
        replies = [reader.take(id_, raw) for id_, raw in entries]
        found[by_key[key]] = [reply for reply in replies if reply is not None]
        if reader.trims:
            link.call("XTRIM", key, "MINID", "=", str(reader.read_to.next()))
    return found
