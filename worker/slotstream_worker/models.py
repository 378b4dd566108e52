"""The adapters under their public name: `slotstream_worker.models.linen`, `.carry`."""

from slotstream_worker.engine.models import carry, linen

__all__ = ["carry", "linen"]
