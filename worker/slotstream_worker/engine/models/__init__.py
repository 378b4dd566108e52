"""Adapters: what turns a model someone trained into a `StreamModel`, one a module."""

from slotstream_worker.engine.models.carry import carry
from slotstream_worker.engine.models.cells import rnn
from slotstream_worker.engine.models.equinox import equinox
from slotstream_worker.engine.models.example import example
from slotstream_worker.engine.models.linen import linen
from slotstream_worker.engine.models.nnx import nnx

__all__ = ["carry", "equinox", "example", "linen", "nnx", "rnn"]
