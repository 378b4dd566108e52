"""Replies: entries of `out` as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from slotstream.codec import Array, decode
from slotstream.errors import BadReply
from slotstream.ids import EntryId


@dataclass(frozen=True)
class ReplyError:
    """Why an entry was not run: a `code` for programs, a `message` for people."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclass(frozen=True)
class Reply:
    """The answer to one entry of a session's stream.

    Attributes:
        id: the id of the entry it answers (a session's last reply may answer none).
        output: `[frame, ...]`, or a mapping of names to such; None without an output.
        error: why the entry was not run; it left the session as it was.
        weights: name of the weights that ran it.
        end: whether this is the session's last reply.
        reason: why the session ended: `end`, `close`, `replay_gap`, ...
        cancelled: with `end`, how many entries were not run.
        op: what was done: `opened`, `reset`.
        worker: with `opened`, who took the session.
        latency_s: seconds from the push to this reply's receipt, where the same client did both.
    """

    id: EntryId
    output: Array | dict[str, Array] | None = None
    error: ReplyError | None = None
    weights: str | None = None
    end: bool = False
    reason: str | None = None
    cancelled: int = 0
    op: str | None = None
    worker: str | None = None
    latency_s: float | None = None


def parse_reply(raw_id: bytes, raw: Sequence[bytes], latency_s: float | None = None) -> Reply:
    """Read an entry of `out` from its fields and values in turn; raises `BadReply`."""
    items = iter(raw)
    fields = dict(zip(items, items, strict=True))

    def text(name: bytes) -> str | None:
        return fields[name].decode("utf-8", "replace") if name in fields else None

    return Reply(
        id=EntryId.parse(raw_id),
        output=decode(fields[b"output"], max_bytes=2**31) if b"output" in fields else None,
        error=_error(fields[b"error"]) if b"error" in fields else None,
        weights=text(b"weights"),
        end=fields.get(b"end") == b"1",
        reason=text(b"reason"),
        cancelled=int(fields.get(b"cancelled", b"0")),
        op=text(b"op"),
        worker=text(b"worker"),
        latency_s=latency_s,
    )


def _error(raw: bytes) -> ReplyError:
    try:
        value: Any = msgpack.unpackb(raw, raw=False)
        return ReplyError(str(value["code"]), str(value["message"]))
    except (ValueError, KeyError, TypeError) as error:
        raise BadReply(
            f"an error is a msgpack map of code and message, got {raw[:40]!r}"
        ) from error
