"""Staging: a version's bytes come in, are compared with their digests, and lie as the engine wants.

Each shard is hashed and put in place on another thread while the next one comes. What is not as it
should be is fetched again, from every source there is, a bounded number of times.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import redis

from slotstream.endpoint import passes
from slotstream_worker.weights.digests import digest
from slotstream_worker.weights.errors import BadBytes, Refused, ShardGone
from slotstream_worker.weights.layout import Layout
from slotstream_worker.weights.manifest import Manifest, Shard, Tensor
from slotstream_worker.weights.plan import Plan, Step
from slotstream_worker.weights.spans import Spans
from slotstream_worker.weights.transports.base import Tick, Transport

log = logging.getLogger(__name__)

TRIES = 3
"""How often a shard is fetched from each source before the version is given up."""
_ALOFT = 2
"""Shards that are being hashed while the next one comes."""
_OUTAGE_WAIT_S = 0.2


class Staging:
    """One version on its way into the engine's layout. Its memory goes with `release`.

    Args:
        manifest: the version.
        plan: what is to be moved.
        layout: where it goes.
        limit_bytes: the most memory it may take; 0 for no limit.

    Raises:
        Refused: it would take more.
    """

    def __init__(
        self, manifest: Manifest, plan: Plan, layout: Layout, *, limit_bytes: int = 0
    ) -> None:
        self._manifest, self._plan, self._layout = manifest, plan, layout
        self.spans = Spans()
        self.moved_bytes: dict[str, int] = {}
        """Bytes that came, by transport."""
        # The buffers, and shards that cannot be received in place: the one that comes, and those
        # that are being hashed.
        self.nbytes = layout.nbytes + (_ALOFT + 1) * plan.largest
        if limit_bytes and self.nbytes > limit_bytes:
            self.nbytes = 0
            raise Refused(
                "staging",
                f"staging it takes {layout.nbytes + (_ALOFT + 1) * plan.largest:,} bytes, and "
                f"--staging-bytes is {limit_bytes:,}; raise it, or publish smaller shards",
            )
        self._buffers = layout.allocate()

    def run(self, transports: Sequence[Transport], tick: Tick) -> None:
        """Move and verify every shard of the plan.

        Args:
            transports: tried in this order.
            tick: called often; what it raises ends the staging.

        Raises:
            Refused: a shard is nowhere to be had as its digest says.
        """
        aloft: deque[tuple[Step, Future[bool]]] = deque()
        with ThreadPoolExecutor(_ALOFT, thread_name_prefix="verify") as pool:
            try:
                for step in self._plan.steps:
                    into = self._memory(step)
                    self._fetch(step, into, transports, tick)
                    aloft.append((step, pool.submit(self._settle, step, into)))
                    while len(aloft) >= _ALOFT:
                        self._landed(*aloft.popleft(), transports, tick)
                while aloft:
                    self._landed(*aloft.popleft(), transports, tick)
            except BaseException:
                for _, future in aloft:
                    future.cancel()
                raise

    def place(self) -> Any:
        """The variables, on the engine's devices."""
        with self.spans.span("place"):
            return self._layout.place(self._buffers)

    def release(self) -> None:
        """Give the memory back."""
        self._buffers = {}
        self.nbytes = 0

    def _of(self, step: Step) -> tuple[Tensor, Shard]:
        tensor = self._manifest.tensors[step.tensor]
        return tensor, tensor.shards[step.shard]

    def _memory(self, step: Step) -> np.ndarray[Any, Any]:
        """Bytes to receive a shard in: the leaf's own, or some that are copied from later."""
        if step.direct:
            copy = step.copies[0]
            # With the ellipsis an array without axes gives itself, and not a copy of its number.
            index: Any = (..., *copy.target)
            part = self._buffers[copy.leaf, copy.box][index]
            flat: np.ndarray[Any, Any] = part.reshape(-1).view(np.uint8)
            return flat
        return np.empty(step.nbytes, np.uint8)

    def _fetch(
        self, step: Step, into: np.ndarray[Any, Any], transports: Sequence[Transport], tick: Tick
    ) -> None:
        """Receive a shard from the first source that gives it; outages are waited out.

        Raises:
            Refused: none does.
        """
        tensor, shard = self._of(step)
        reasons = []
        for transport in transports:
            if not transport.has(tensor, shard):
                continue
            while True:
                try:
                    with self.spans.span("transfer"):
                        transport.read(tensor, shard, into.data, tick)
                except ShardGone as error:
                    reasons.append(str(error))
                    break
                except (redis.RedisError, OSError) as error:
                    if not passes(error):
                        raise
                    log.warning("staging waits: %s", error)
                    tick()
                    time.sleep(_OUTAGE_WAIT_S)
                    continue
                kind = transport.kind
                self.moved_bytes[kind] = self.moved_bytes.get(kind, 0) + step.nbytes
                return
        kinds = sorted({source.kind for source in shard.sources}) or ["nowhere"]
        raise Refused(
            "staging",
            "; ".join(reasons)
            or f"{tensor.name}{shard.box} lies in {', '.join(kinds)}, and this worker reads "
            f"{', '.join(t.kind for t in transports)}",
        )

    def _settle(self, step: Step, into: np.ndarray[Any, Any]) -> bool:
        """Compare a shard with its digest and put it in place; whether it was right."""
        tensor, shard = self._of(step)
        with self.spans.span("verify"):
            if digest(into.data) != shard.digest:
                return False
        if not step.direct:
            with self.spans.span("arrange"):
                values = into.view(tensor.numpy).reshape(shard.box.extent)
                for copy in step.copies:
                    # A cast that the plan has allowed; what overflows becomes an infinity.
                    with np.errstate(over="ignore"):
                        self._buffers[copy.leaf, copy.box][copy.target] = values[
                            copy.source
                        ].astype(self._buffers[copy.leaf, copy.box].dtype, copy=False)
        return True

    def _landed(
        self, step: Step, future: Future[bool], transports: Sequence[Transport], tick: Tick
    ) -> None:
        if future.result():
            return
        tensor, shard = self._of(step)
        for _ in range(TRIES - 1):
            for transport in transports:
                if transport.has(tensor, shard):
                    into = self._memory(step)
                    try:
                        self._fetch(step, into, [transport], tick)
                    except Refused:
                        continue
                    if self._settle(step, into):
                        log.warning("%s%s came right at a later try", tensor.name, shard.box)
                        return
        raise Refused("digest", str(BadBytes(
            f"{tensor.name}{shard.box}: the bytes that came are not those of its digest, "
            f"{TRIES} times from each source; publish the version again under another name"
        )))  # fmt: skip
