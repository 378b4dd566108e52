"""Entries of one session that go together, in order: packed once, judged by their answers.

More than one at a time is a transaction (`MULTI`). Without it a condition that passes by itself
(no memory, too few replicas) could refuse an entry and let the next one in, and the session's
frames would run in another order than they were pushed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slotstream.arguments import LENGTHS, argument
from slotstream.endpoint import passes
from slotstream.ids import EntryId

if TYPE_CHECKING:
    from slotstream.session import Session

Fields = dict[str, bytes | str]
"""An entry's fields, in the order they are sent."""

Buffer = bytes | memoryview

_MULTI, _EXEC = b"*1\r\n$5\r\nMULTI\r\n", b"*1\r\n$4\r\nEXEC\r\n"
_NOMKSTREAM = b"$10\r\nNOMKSTREAM\r\n"
_FRAME, _END = b"\r\n$5\r\nframe\r\n$", b"\r\n$3\r\nend\r\n$1\r\n1\r\n"
_LINE_END = b"\r\n"


@dataclass(frozen=True, slots=True)
class Frames:
    """Encoded frames, each in two parts that need only be joined into a command.

    Attributes:
        before: what stands before each frame's own bytes; the same for all.
        datas: each frame's own bytes.
    """

    before: bytes
    datas: list[Buffer]

    @staticmethod
    def before_data(header: bytes, nbytes: int) -> bytes:
        """The first part, where the second is `nbytes` of data behind a fixed header."""
        return b"%b%d\r\n%b" % (_FRAME, len(header) + nbytes, header)

    @staticmethod
    def whole(encoding: bytes) -> bytes:
        """The second part, where it is a whole encoding, the first being `ANY`."""
        return b"%d\r\n%b" % (len(encoding), encoding)

    def encoding(self, k: int) -> bytes:
        """The `k`-th frame as the field `frame` holds it."""
        return (self.before[len(_FRAME) :] + bytes(self.datas[k])).partition(_LINE_END)[2]


ANY = _FRAME
NONE = Frames(b"", [])


def xadd_head(inbox: str) -> bytes:
    """The bytes of every `XADD` to `inbox` from the number of its arguments to its key."""
    return _LINE_END + argument(b"XADD") + argument(inbox.encode())


@dataclass(slots=True)
class Burst:
    """Entries of one session, noted as pushed.

    Attributes:
        session: whose.
        first: the first id.
        ids: their ids as Redis writes them: consecutive, unless some were refused.
        frames: their frames; without any it is one entry that holds only `end`.
        end: whether the last one ends the session.
    """

    session: Session
    first: EntryId
    ids: list[bytes]
    frames: Frames
    end: bool
    renumbered: bool = False

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes; the frames of a burst are of about one size."""
        data = len(self.frames.datas[0]) if self.frames.datas else 0
        return len(self.ids) * (data + len(self.frames.before) + len(self.session.xadd) + 40)

    @property
    def answers(self) -> int:
        """How many answers come to it."""
        return 1 if len(self.ids) == 1 else len(self.ids) + 2

    def pack(self, parts: list[Buffer], *, repeated: bool) -> None:
        """Add its commands to `parts`; one that is repeated makes no stream anew."""
        ids, before, datas = self.ids, self.frames.before, self.frames.datas
        if not datas:
            before, datas = b"", [b""]
        # The bytes of the key are the same in each; only the number of arguments may differ.
        behind = self.session.xadd + (_NOMKSTREAM if repeated else b"") + b"$"
        count = 5 if self.frames.datas else 3
        starts = [b"*%d%b" % (count + repeated, behind)] * len(ids)
        tails = [_LINE_END] * len(ids)
        if self.end:
            starts[-1] = b"*%d%b" % (count + 2 + repeated, behind)
            tails[-1] = _END
        add = parts.extend
        if len(ids) > 1:
            parts.append(_MULTI)
        for start, id_, data, tail in zip(starts, ids, datas, tails, strict=True):
            add((start, LENGTHS[len(id_)], id_, before, data, tail))
        if len(ids) > 1:
            parts.append(_EXEC)

    def fields(self, k: int) -> Fields:
        """The fields of its `k`-th entry, for sending it alone."""
        found: Fields = {"frame": self.frames.encoding(k)} if self.frames.datas else {}
        if self.end and k == len(self.ids) - 1:
            found["end"] = "1"
        return found

    def refused(self, answers: Sequence[Any]) -> list[int]:
        """Places of the entries that Redis did not take, since their ids are not larger than all.

        Raises:
            redis.RedisError: none was taken, and why.
        """
        results = answers if len(self.ids) == 1 else answers[-1]
        if results == self.ids:
            return []
        if not isinstance(results, list):
            results = list(answers)  # a transaction that was given up; the first refusal is why
        errors = [answer for answer in results if isinstance(answer, Exception)]
        for error in sorted(errors, key=passes, reverse=True):
            if "equal or smaller" not in str(error):
                raise error
        # A stream that is not made anew has no id to give.
        return [k for k, result in enumerate(results) if not isinstance(result, bytes)]

    def one_by_one(self, places: Sequence[int], *, repeated: bool) -> None:
        """Append some of its entries, each by itself; their ids may change."""
        for k in places:
            was = EntryId.parse(self.ids[k])
            now = self.session.send(was, self.fields(k), repeated=repeated)
            self.ids[k] = str(now).encode()
            self.renumbered = self.renumbered or now != was

    def entry_ids(self) -> list[EntryId]:
        """The ids of its entries."""
        if self.renumbered:
            return [EntryId.parse(raw) for raw in self.ids]
        return EntryId.consecutive(self.first, len(self.ids))


def pack_bursts(bursts: Sequence[Burst], *, repeated: bool) -> bytes:
    """All commands of some bursts, as Redis reads them."""
    parts: list[Buffer] = []
    for burst in bursts:
        burst.pack(parts, repeated=repeated)
    return b"".join(parts)
