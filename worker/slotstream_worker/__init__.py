"""slotstream's worker: serve a streaming model to many sessions behind one device."""

from slotstream_worker import models
from slotstream_worker.engine.errors import CannotStream
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.engine.server import StreamServer

__all__ = ["CannotStream", "StreamModel", "StreamServer", "models"]
