"""Bursts of many sessions on their way: sent in one go, each taken once, through outages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import redis

from slotstream.bursts import Burst, pack_bursts
from slotstream.endpoint import passes
from slotstream.errors import OutOfOrder
from slotstream.exchange import Exchange
from slotstream.link import Link

_SLICE_BYTES = 2**18
"""Bytes joined and sent at a time: Redis works on them while the next are joined."""


def send(link: Link, bursts: Sequence[Burst]) -> None:
    """Append bursts, at most one of each session; each entry once, whatever is cut off.

    Where somebody else has written to a session's stream, its entries come after theirs, and
    their ids change.

    Raises:
        OutOfOrder: somebody else numbered entries of a session between those of its burst.
        redis.RedisError: an outage longer than the link's patience, or what Redis refused.
    """
    batch = _Batch(link, bursts)
    link.patiently(batch.attempt)
    batch.place_refused()


class _Batch:
    """Bursts, until each is settled: taken, or refused for its ids."""

    def __init__(self, link: Link, bursts: Sequence[Burst]) -> None:
        self._link, self._unsettled = link, list(bursts)
        self._repeated = False
        self._refused: list[tuple[Burst, list[int], bool]] = []

    def attempt(self) -> None:
        """Send what is not settled; raises what passes, and then may be called again."""
        if self._repeated:
            self._unsettled = _missing(self._link, self._unsettled)
        bursts, self._unsettled = self._unsettled, []
        repeated, self._repeated = self._repeated, True
        outage: Exception | None = None
        for own, answers, error in _exchange(self._link, bursts, repeated):
            outage = error or outage
            at = 0
            for burst in own:
                got = answers[at : at + burst.answers]
                at += burst.answers
                try:
                    # Without an answer it may have been taken; that is asked before it is repeated.
                    places = burst.refused(got) if len(got) == burst.answers else None
                except redis.RedisError as reason:
                    if not passes(reason):
                        raise
                    places, outage = None, reason
                if places is None:
                    self._unsettled.append(burst)
                elif places:
                    self._refused.append((burst, places, repeated))
        if outage is not None:
            raise outage

    def place_refused(self) -> None:
        """Append what was refused behind whatever it was refused for."""
        for burst, places, repeated in self._refused:
            if places[-1] - places[0] >= len(places) or places[-1] != len(burst.ids) - 1:
                # A worker's own mark may stand between: nothing behind it is run, in any order.
                if self._link.call("HGET", burst.session.row, "status") in (b"closing", b"closed"):
                    continue
                raise OutOfOrder(
                    f"somebody else pushed into {burst.session} at the same moment: of "
                    f"{len(burst.ids)} entries those at {places} were refused and later ones "
                    "taken; one producer at a time numbers a session's entries"
                )
            burst.one_by_one(places, repeated=repeated)


def _exchange(
    link: Link, bursts: Sequence[Burst], repeated: bool
) -> list[tuple[list[Burst], list[Any], Exception | None]]:
    """Send bursts to their servers; for each server its bursts, the answers, what cut them off."""
    by_pool: dict[redis.ConnectionPool, list[Burst]] = defaultdict(list)
    outcomes: list[tuple[list[Burst], list[Any], Exception | None]] = []
    for burst in bursts:
        by_pool[link.endpoint.pool(burst.session.inbox)].append(burst)
    with ExitStack() as stack:
        under_way = []
        # All servers work at once: each is sent its own before any is waited for.
        for pool, own in by_pool.items():
            try:
                exchange = stack.enter_context(Exchange(pool))
                for part in _slices(own):
                    answers = sum(burst.answers for burst in part)
                    exchange.send(pack_bursts(part, repeated=repeated), answers)
                under_way.append((exchange, own))
            except (redis.RedisError, OSError) as error:
                if not passes(error):
                    raise
                outcomes.append((own, [], error))
        for exchange, own in under_way:
            found: list[Any] = []
            cut: Exception | None = None
            try:
                exchange.receive(found)
            except (redis.RedisError, OSError) as error:
                if not passes(error):
                    raise
                cut = error
            outcomes.append((own, found, cut))
    return outcomes


def _slices(bursts: Sequence[Burst]) -> Iterator[list[Burst]]:
    part: list[Burst] = []
    size = 0
    for burst in bursts:
        part.append(burst)
        size += burst.nbytes
        if size >= _SLICE_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _missing(link: Link, bursts: Sequence[Burst]) -> list[Burst]:
    """Those of some bursts, sent before, of which Redis holds nothing: it takes all or none."""
    commands: list[tuple[str | bytes, ...]] = []
    for burst in bursts:
        span = burst.ids[0], burst.ids[-1], "COUNT", "1"
        commands += [
            ("XRANGE", burst.session.inbox, *span),
            ("XRANGE", burst.session.outbox, *span),
            ("HGET", burst.session.row, "status"),
        ]
    answers = iter(link.try_calls(commands))
    found = []
    for burst, entries, replies, status in zip(bursts, answers, answers, answers, strict=True):
        for answer in (entries, replies, status):
            if isinstance(answer, Exception):
                raise answer
        # A session that has ended took its stream along: nothing more is to be pushed into it.
        if not entries and not replies and status != b"closed":
            found.append(burst)
    return found
