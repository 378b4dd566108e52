"""The wire bound: the same frames read and the same replies written as by a worker, and no model.

The cheapest loop that still reads every frame, writes every reply to `out`, and advances `done`
atomically behind a fence: for a batch of sessions one XREAD, then one script call (`bound.lua`:
one HMGET, one XADD a reply, one HSET a session). The read of a later batch rides with the script,
so Redis and this process work at the same time. No checkpoints, no trimming, no lease, no tracking.

`depth` says how many replies of a session share a fence: as many as were read (the cheapest), or
one (a commit a round, as a worker has that answers every round when it is done).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.backlog import Backlog
from benchmarks.lean import pack

READ_AHEAD = 16
_OWNER, _EPOCH = b"bound.0", b"1"


class WireBound:
    """The loop, over the streams of `backlog`; `reply` is what it answers every frame with.

    Args:
        backlog: the sessions and their frames, in an app of their own.
        reply: one reply's `output` and `weights`, as a worker wrote them.
        depth: replies of a session a script call, at most.
        batch: sessions a read; by default few enough that two reads are always under way.
    """

    def __init__(
        self,
        backlog: Backlog,
        reply: tuple[bytes, bytes],
        *,
        depth: int = READ_AHEAD,
        batch: int = 0,
    ) -> None:
        self.backlog, self.depth = backlog, depth
        self._connection = backlog.connection
        prefix = backlog.keys.prefix.encode()
        self._output = reply[0]
        text = (Path(__file__).parent / "bound.lua").read_text()
        self._head = (b"EVALSHA", self._connection.script(text), 0, prefix, _OWNER, reply[1])
        self._strip = len(prefix) + len(b"in:")
        names = [name.encode() for name in backlog.sessions]
        self.done = dict.fromkeys(names, b"0-0")
        for name in names:
            row = ("owner", _OWNER, "epoch", _EPOCH, "done", b"0-0")
            self._connection.call("HSET", prefix + b"slot:" + name, *row)
        batch = batch or max(1, min(32, len(names) // 4))
        parts = [names[start : start + batch] for start in range(0, len(names), batch)]
        self._batches = [(part, [prefix + b"in:" + name for name in part]) for part in parts]

    def run(self, total: int) -> int:
        """Answer `total` frames; returns how many replies Redis says were written."""
        connection, batches = self._connection, len(self._batches)
        expected: deque[bool] = deque()  # of each answer that is to come: whether a read's
        reads = answered = written = 0
        # Two reads at a time, so that Redis works on one batch while this process is at another;
        # where there is one batch, its next read waits for the positions of the one before.
        sent = []
        for _ in range(min(2, batches)):
            sent.append(self._read(reads % batches))
            expected.append(True)
            reads += 1
        connection.send(b"".join(sent))
        while expected:
            answer = connection.receive()
            if not expected.popleft():
                written += answer
                continue
            sent, count = self._answers(answer or ())
            expected.extend([False] * len(sent))
            answered += count
            if answered < total:
                sent.append(self._read(reads % batches))
                expected.append(True)
                reads += 1
            if sent:
                connection.send(b"".join(sent))
        return written

    def _read(self, turn: int) -> bytes:
        names, inboxes = self._batches[turn]
        done = self.done
        return pack("XREAD", "COUNT", READ_AHEAD, "STREAMS", *inboxes, *[done[n] for n in names])

    def _answers(self, found: Sequence[Any]) -> tuple[list[bytes], int]:
        """Script calls that answer what was read, and how many frames they answer."""
        depth, output, strip, done = self.depth, self._output, self._strip, self.done
        calls, count, start, going = [], 0, 0, True
        while going:
            args, going = [], False
            for key, entries in found:
                part = entries[start : start + depth]
                if not part:
                    continue
                name = key[strip:]
                args += (name, _EPOCH, done[name], len(part))
                for id_, _fields in part:
                    args += (id_, output)
                done[name] = part[-1][0]
                count += len(part)
                going = going or len(entries) > start + depth
            start += depth
            if args:
                calls.append(pack(*self._head, *args))
        return calls, count
