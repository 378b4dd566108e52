"""One partition of an app as a worker holds it: its connections, its inbox, table and lease."""

from __future__ import annotations

from slotstream.connect import connection_pool
from slotstream.lines import Line
from slotstream.names import Keys
from slotstream_worker.config import WorkerConfig
from slotstream_worker.store.inbox import Inbox
from slotstream_worker.store.lease import Lease
from slotstream_worker.store.table import SlotTable


class Partition:
    """Everything a worker has open to Redis. `connect` opens it, again after it broke."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.keys = Keys(config.app)
        self._pool = connection_pool(config.redis, name=f"slotstream-worker:{config.worker}")
        self.lease = Lease(
            self._pool, self.keys, config.worker, lease_s=config.lease_s, stall_s=config.stall_s
        )
        self._open: tuple[Line, Inbox, SlotTable] | None = None

    def connect(self) -> None:
        """Open the connections, closing what is left of older ones."""
        self.close()
        line = Line(self._pool)
        try:
            inbox = Inbox(self._pool, self.keys)
        except BaseException:
            line.close()
            raise
        table = SlotTable(
            line,
            self.keys,
            self.config.worker,
            reply_ttl_s=self.config.reply_ttl_s,
            retention=self.config.reply_retention,
        )
        self._open = (line, inbox, table)

    def close(self) -> None:
        """Close the connections."""
        if self._open:
            self._open[0].close()
            self._open[1].close()
            self._open = None

    @property
    def line(self) -> Line:
        """The connection that scripts run on."""
        return self._held()[0]

    @property
    def inbox(self) -> Inbox:
        """The streams that come in."""
        return self._held()[1]

    @property
    def table(self) -> SlotTable:
        """The slot table."""
        return self._held()[2]

    def _held(self) -> tuple[Line, Inbox, SlotTable]:
        if self._open is None:
            raise RuntimeError("the partition is not connected; call connect() first")
        return self._open
