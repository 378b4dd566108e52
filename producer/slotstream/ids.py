"""Ids of stream entries, `milliseconds-sequence`, as values that compare as Redis compares them."""

from __future__ import annotations

from typing import NamedTuple

from slotstream.errors import BadReply

_TOP = 2**64 - 1
_new = tuple.__new__  # the named tuple's own takes twice as long


class EntryId(NamedTuple):
    """An entry's id; tuples compare as Redis compares ids (as text, `9-0` would follow `10-0`)."""

    ms: int
    seq: int = 0

    @classmethod
    def parse(cls, text: bytes | str) -> EntryId:
        """Read `b"12-3"` or `"12-3"` (or `"12"`, which is `12-0`)."""
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
        ms, _, seq = raw.partition(b"-")
        if not (ms.isdigit() and (not seq or seq.isdigit())):
            raise BadReply(f"an entry's id is two numbers, as in 1526919030474-0; got {text!r}")
        return _new(cls, (int(ms), int(seq or b"0")))

    @classmethod
    def consecutive(cls, first: EntryId, count: int) -> list[EntryId]:
        """`count` ids of one millisecond, from `first` on."""
        ms, seq = first
        return [_new(cls, (ms, n)) for n in range(seq, seq + count)]

    def next(self) -> EntryId:
        """The smallest id after this one."""
        return EntryId(self.ms, self.seq + 1) if self.seq < _TOP else EntryId(self.ms + 1, 0)

    def __str__(self) -> str:
        return f"{self.ms}-{self.seq}"


ZERO = EntryId(0, 0)
OPENED = EntryId(0, 1)
