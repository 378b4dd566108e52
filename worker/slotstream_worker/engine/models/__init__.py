"""Adapters: what turns a model someone trained into a `StreamModel`, one a module."""

from slotstream_worker.engine.models.carry import carry
from slotstream_worker.engine.models.linen import linen

__all__ = ["carry", "linen"]
