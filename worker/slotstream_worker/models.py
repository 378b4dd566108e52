"""The adapters under their public name: `slotstream_worker.models.linen` and the others."""

from slotstream_worker.engine.models import carry, equinox, example, linen, nnx, rnn

__all__ = ["carry", "equinox", "example", "linen", "nnx", "rnn"]
