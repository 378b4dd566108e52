"""One partition of an app as a worker holds it: its connections, its inbox, table and lease."""

from __future__ import annotations

import logging
import re

from slotstream.endpoint import Endpoint
from slotstream.lines import Line
from slotstream.names import Keys
from slotstream_worker.config import WorkerConfig
from slotstream_worker.store.appconfig import Disagreement
from slotstream_worker.store.inbox import Inbox
from slotstream_worker.store.table import SlotTable

log = logging.getLogger(__name__)


class Partition:
    """What a worker has open to one partition. `connect` opens it, again after it broke."""

    def __init__(self, config: WorkerConfig, endpoint: Endpoint, partition: int = 0) -> None:
        self.config = config
        self.keys = Keys(config.app, partition)
        self._endpoint = endpoint
        self._open: tuple[Line, Inbox, SlotTable, Line] | None = None

    def connect(self) -> None:
        """Open the connections, to whoever holds the partition now."""
        self.close()
        self._endpoint.forget()
        pool = self._endpoint.pool(self.keys.control)
        lines: list[Line] = []
        try:
            lines = [Line(pool) for _ in range(2)]
            inbox = Inbox(pool, self.keys, self.config.worker)
        except BaseException:
            for opened in lines:
                opened.close()
            raise
        line, commits = lines
        table = SlotTable(
            line,
            self.keys,
            self.config.worker,
            reply_ttl_s=self.config.reply_ttl_s,
            retention=self.config.reply_retention,
            max_attempts=self.config.max_attempts,
            declares=self._endpoint.cluster,
        )
        self._open = (line, inbox, table, commits)

    def close(self) -> None:
        """Close the connections."""
        if self._open:
            line, inbox, _, commits = self._open
            line.close()
            inbox.close()
            commits.close()
            self._open = None

    def refuse_eviction(self) -> None:
        """Raise `Disagreement` where Redis may delete rows to make room.

        A policy is named to be allowed all the same. One that deletes only keys that expire can
        take leases and the replies of closed sessions: that costs takeovers, and is warned of.
        """
        info = self.line.call("INFO", "memory").decode()
        policy = re.search(r"maxmemory_policy:(\S+)", info)
        name = policy.group(1) if policy else "noeviction"
        if name == self.config.allow_eviction or name == "noeviction":
            return
        if name.startswith("allkeys"):
            raise Disagreement(
                f"Redis has maxmemory-policy {name}, which deletes sessions without a word when "
                "memory is short; set it to noeviction (writes are then refused, and waited for), "
                f"or say --allow-eviction {name}"
            )
        log.warning("Redis has maxmemory-policy %s: leases may go before their time", name)

    @property
    def connected(self) -> bool:
        """Whether the connections have been opened."""
        return self._open is not None

    @property
    def line(self) -> Line:
        """The connection of what is asked and answered at once."""
        return self._held()[0]

    @property
    def inbox(self) -> Inbox:
        """The streams that come in."""
        return self._held()[1]

    @property
    def table(self) -> SlotTable:
        """The slot table."""
        return self._held()[2]

    @property
    def commits(self) -> Line:
        """The connection that commits go out on, whose answers are taken in later."""
        return self._held()[3]

    @property
    def filenos(self) -> tuple[int, ...]:
        """Sockets on which something may come without having been waited for."""
        return (self.inbox.heard.fileno(), self.inbox.reader.fileno(), self.commits.fileno())

    def _held(self) -> tuple[Line, Inbox, SlotTable, Line]:
        if self._open is None:
            raise RuntimeError("the partition is not connected; call connect() first")
        return self._open
