"""Ids of stream entries, `milliseconds-sequence`, as values that compare as Redis compares them."""

from __future__ import annotations

from typing import NamedTuple

from slotstream.errors import BadReply

_TOP = 2**64 - 1


class EntryId(NamedTuple):
    """An entry's id; tuples compare as Redis compares ids (as text, `9-0` would follow `10-0`)."""

    ms: int
    seq: int = 0

    @classmethod
    def parse(cls, text: bytes | str) -> EntryId:
        """Read `b"12-3"` or `"12-3"` (or `"12"`, which is `12-0`)."""
        if isinstance(text, bytes):
            text = text.decode("latin-1")
        ms, _, seq = text.partition("-")
        if not (ms.isascii() and ms.isdigit() and (not seq or (seq.isascii() and seq.isdigit()))):
            raise BadReply(f"an entry's id is two numbers, as in 1526919030474-0; got {text!r}")
        return cls(int(ms), int(seq or 0))

    def next(self) -> EntryId:
        """The smallest id after this one."""
        return EntryId(self.ms, self.seq + 1) if self.seq < _TOP else EntryId(self.ms + 1, 0)

    def __str__(self) -> str:
        return f"{self.ms}-{self.seq}"


ZERO = EntryId(0, 0)
OPENED = EntryId(0, 1)
