"""How a shard's bytes come: chunks in Redis, files on a shared path, a worker that has them."""

from slotstream_worker.weights.transports.base import Transport
from slotstream_worker.weights.transports.chunks import Chunks
from slotstream_worker.weights.transports.paths import Paths
from slotstream_worker.weights.transports.peers import Peers

__all__ = ["Chunks", "Paths", "Peers", "Transport"]
