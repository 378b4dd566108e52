"""slotstream: push frames of many sessions to a streaming model, read their outputs.

This package is all that a producer needs; it does not need JAX.
"""

from slotstream.client import Client
from slotstream.codec import FrameCodec, decode, encode
from slotstream.errors import (
    BadFrame,
    BadName,
    BadReply,
    OutOfOrder,
    ReplyTimeout,
    SessionClosed,
    SessionExists,
    SlotstreamError,
    Unavailable,
)
from slotstream.ids import EntryId
from slotstream.replies import Reply, ReplyError
from slotstream.session import Session

__version__ = "0.1.0"

__all__ = [
    "BadFrame",
    "BadName",
    "BadReply",
    "Client",
    "EntryId",
    "FrameCodec",
    "OutOfOrder",
    "Reply",
    "ReplyError",
    "ReplyTimeout",
    "Session",
    "SessionClosed",
    "SessionExists",
    "SlotstreamError",
    "Unavailable",
    "decode",
    "encode",
]
