"""Every error slotstream raises, each with the code it has on the wire."""

from __future__ import annotations


class SlotstreamError(Exception):
    """Base of all of slotstream's own errors. `code` is what an `error` reply carries."""

    code = "error"


class BadName(SlotstreamError, ValueError):
    """An app or session name the keys cannot be made of."""

    code = "bad_name"


class BadFrame(SlotstreamError, ValueError):
    """An entry of `in` that cannot be run; `code` says which of its kinds it is."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class BadReply(SlotstreamError, ValueError):
    """An entry of `out` that does not follow the protocol."""

    code = "bad_reply"


class SessionExists(SlotstreamError):
    """`open` of a session that is already open."""

    code = "session_exists"


class SessionClosed(SlotstreamError):
    """A push into a session that has ended."""

    code = "session_closed"


class OutOfOrder(SlotstreamError):
    """Frames of a session run in another order than they were pushed in: it has two producers."""

    code = "out_of_order"


class ReplyTimeout(SlotstreamError, TimeoutError):
    """No reply within the time given."""

    code = "timeout"


class Unavailable(SlotstreamError):
    """Something needed is missing here: a server binary, an optional package."""

    code = "unavailable"
