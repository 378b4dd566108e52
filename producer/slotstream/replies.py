"""Replies: entries of `out` as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from slotstream.codec import Array, decode
from slotstream.errors import BadReply
from slotstream.ids import EntryId

_MOST_BYTES = 2**31


@dataclass(frozen=True)
class ReplyError:
    """Why an entry was not run: a `code` for programs, a `message` for people."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class Reply:
    """The answer to one entry of a session's stream.

    What it holds is read from its bytes when it is asked for, so that a reader of a hundred
    thousand replies a second pays for what it looks at. `output` and `error` raise `BadFrame` and
    `BadReply` where the bytes do not follow the protocol.

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

    Args:
        raw_id: the entry's id, as Redis writes it.
        raw: its fields and values in turn.
        latency_s: as above.
    """

    __slots__ = ("_fields", "_id", "_raw", "latency_s", "raw_id")

    def __init__(self, raw_id: bytes, raw: Sequence[bytes], latency_s: float | None = None) -> None:
        self.raw_id = raw_id
        self._id: EntryId | None = None
        self._raw: Sequence[bytes] | None = raw
        self._fields: dict[bytes, Any]
        self.latency_s = latency_s

    def __repr__(self) -> str:
        names = ("output", "error", "weights", "reason", "cancelled", "op", "worker", "latency_s")
        shown = [f"{name}={value!r}" for name in names if (value := getattr(self, name))]
        return f"Reply({', '.join([f'id={self.id}', f'end={self.end}', *shown])})"

    @property
    def id(self) -> EntryId:
        """Id of the entry it answers."""
        if self._id is None:
            self._id = EntryId.parse(self.raw_id)
        return self._id

    @property
    def output(self) -> Array | dict[str, Array] | None:
        """What the model gave; decoded once."""
        fields = self._read()
        value = fields.get(b"output")
        if type(value) is bytes:
            value = fields[b"output"] = decode(value, max_bytes=_MOST_BYTES)
        found: Array | dict[str, Array] | None = value
        return found

    @property
    def error(self) -> ReplyError | None:
        """Why the entry was not run."""
        raw = self._read().get(b"error")
        return None if raw is None else _error(raw)

    @property
    def end(self) -> bool:
        """Whether this is the session's last reply."""
        return self._read().get(b"end") == b"1"

    @property
    def cancelled(self) -> int:
        """With `end`, how many entries were not run."""
        return int(self._read().get(b"cancelled", b"0"))

    @property
    def weights(self) -> str | None:
        """Name of the weights that ran it."""
        return self._text(b"weights")

    @property
    def reason(self) -> str | None:
        """Why the session ended."""
        return self._text(b"reason")

    @property
    def op(self) -> str | None:
        """What was done."""
        return self._text(b"op")

    @property
    def worker(self) -> str | None:
        """With `opened`, who took the session."""
        return self._text(b"worker")

    def _read(self) -> dict[bytes, Any]:
        raw = self._raw
        if raw is not None:
            self._fields = dict(zip(raw[::2], raw[1::2], strict=True))
            self._raw = None
        return self._fields

    def _text(self, name: bytes) -> str | None:
        value = self._read().get(name)
        return None if value is None else value.decode("utf-8", "replace")


def _error(raw: bytes) -> ReplyError:
    try:
        value: Any = msgpack.unpackb(raw, raw=False)
        return ReplyError(str(value["code"]), str(value["message"]))
    except (ValueError, KeyError, TypeError) as error:
        raise BadReply(
            f"an error is a msgpack map of code and message, got {raw[:40]!r}"
        ) from error
