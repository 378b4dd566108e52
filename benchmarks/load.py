"""An open-loop producer: frames at a fixed rate, whatever comes back, and when each reply came.

Every frame has an instant at which it is due, set beforehand; its latency counts from there, not
from when it was sent. So a stall, of whatever is measured or of this producer, counts for every
frame that fell due in it, and nothing is left out by waiting (no coordinated omission).

Sessions send in a period of their own, each from a random instant on. A frame's id is its place
in the schedule, so a reply's id says which frame it answers. One connection pushes, all that is
due in one write. Replies are read by a blocking XREAD where there is one stream; where there are
many, Redis says which of them have changed (CLIENT TRACKING in its broadcasting mode) and those
are read: 1,000 sessions cost about what one does, and Redis little.
"""

from __future__ import annotations

import gc
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.lean import Connection, pack

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Heard:
    """What came of a drive.

    Attributes:
        latency_ms: of every frame after the warm-up, due to reply; infinite for one that had
            none within the grace.
        late_ms: how late this producer sent each of them: the instrument's own share.
    """

    latency_ms: Array
    late_ms: Array

    @property
    def answered(self) -> float:
        """Share of the frames that were answered."""
        return float(np.isfinite(self.latency_ms).mean())


def schedule(sessions: int, rate_hz: float, seconds: float, seed: int) -> tuple[Array, Array]:
    """When each frame is due, from 0 on, and its session, in the order they are due.

    Args:
        sessions: each of them sends `rate_hz / sessions` frames a second.
        rate_hz: frames a second of all sessions together.
        seconds: how long.
        seed: of the instants at which the sessions begin.
    """
    period = sessions / rate_hz
    begins = np.random.default_rng(seed).uniform(0, period, sessions)
    turns = np.arange(int(np.ceil(seconds / period)) + 1)
    due = (begins[:, None] + period * turns[None, :]).ravel()
    who = np.repeat(np.arange(sessions), len(turns))
    order = np.argsort(due, kind="stable")
    order = order[due[order] < seconds]
    return due[order], who[order]


class _Replies:
    """Reads `out` streams as they grow; gives numbers of frames as they are answered."""

    def __init__(self, url: str, outboxes: Sequence[str], first: int) -> None:
        self._first = first
        after = f"{first - 1}-18446744073709551615"
        self._last: dict[bytes, bytes | str] = {key.encode(): after for key in outboxes}
        self._reader = Connection(url)
        self._changed: set[bytes] = set()
        self._news: Connection | None = None
        self._reading = False
        if len(outboxes) > 1:
            self._news = Connection(url)
            listener = self._news.call("CLIENT", "ID")
            self._news.call("SUBSCRIBE", "__redis__:invalidate")
            prefix = outboxes[0].partition("out:")[0] + "out:"
            self._reader.call(
                "CLIENT", "TRACKING", "ON", "REDIRECT", listener, "BCAST", "PREFIX", prefix
            )
        else:
            self._read()

    @property
    def sockets(self) -> list[Connection]:
        """What to wait on."""
        return [self._reader, self._news] if self._news else [self._reader]

    def take(self, readable: Sequence[Connection]) -> list[int]:
        """Frames that turn out to be answered; called when a socket is readable."""
        found: list[int] = []
        if self._reader in readable:
            for answer in self._reader.ready():
                self._reading = False
                for key, entries in answer or ():
                    self._last[key] = entries[-1][0]
                    found += [self._number(id_, fields) for id_, fields in entries]
        if self._news and self._news in readable:
            for message in self._news.ready():
                if message[0] == b"message" and message[2]:
                    self._changed.update(message[2])
        if not self._reading:
            self._read()
        return found

    def close(self) -> None:
        for connection in self.sockets:
            connection.close()

    def _read(self) -> None:
        if self._news:
            keys = [key for key in self._changed if key in self._last]
            self._changed.clear()
            block: tuple[str, ...] = ()
        else:
            keys, block = list(self._last), ("BLOCK", "0")
        if keys:
            last = [self._last[key] for key in keys]
            self._reader.send(pack("XREAD", "COUNT", 1000, *block, "STREAMS", *keys, *last))
            self._reading = True

    def _number(self, id_: bytes, fields: Sequence[bytes]) -> int:
        if fields[0] != b"output":
            raise RuntimeError(f"a frame was not answered with an output: {fields!r:.200}")
        return int(id_.partition(b"-")[0]) - self._first


def in_turn(
    url: str,
    inboxes: Sequence[str],
    outboxes: Sequence[str],
    frames: Sequence[bytes],
    *,
    turns: int,
    first_id: int,
) -> float:
    """Seconds a frame, where each session sends its next one when its last is answered.

    Nothing piles up, and nobody waits for a clock: the most that sessions can have of which each
    waits for its reply.

    Args:
        url: of Redis.
        inboxes: where each session's frames go.
        outboxes: where its replies come from.
        frames: encoded frames, pushed in turn.
        turns: how many each session sends.
        first_id: the first frame's id; later ones count up from it.

    Raises:
        RuntimeError: nothing was answered for half a minute.
    """
    push, replies = Connection(url), _Replies(url, outboxes, first_id)
    left, who = [turns] * len(inboxes), list[int]()
    waiting = [push, *replies.sockets]

    def send(sessions: Sequence[int]) -> None:
        commands = []
        for session in sessions:
            frame = frames[len(who) % len(frames)]
            id_ = f"{first_id + len(who)}-0"
            commands.append(pack("XADD", inboxes[session], id_, "frame", frame))
            left[session] -= 1
            who.append(session)
        push.send(b"".join(commands))

    try:
        start, total, answered = time.perf_counter(), turns * len(inboxes), 0
        send(range(len(inboxes)))
        while answered < total:
            readable, _, _ = select.select(waiting, [], [], 30.0)
            if not readable:
                raise RuntimeError(f"{len(who) - answered} frames were not answered in 30 s")
            if push in readable:
                push.ready()  # raises what Redis refused
            numbers = replies.take(readable)
            answered += len(numbers)
            if again := [who[n] for n in numbers if left[who[n]]]:
                send(again)
        return (time.perf_counter() - start) / total
    finally:
        push.close()
        replies.close()


def drive(
    url: str,
    inboxes: Sequence[str],
    outboxes: Sequence[str],
    frames: Sequence[bytes],
    *,
    rate_hz: float,
    seconds: float,
    warm_s: float,
    first_id: int,
    sessions: int = 0,
    grace_s: float = 5.0,
    seed: int = 0,
) -> Heard:
    """Push at a fixed rate for some seconds, and say how long each reply took.

    Args:
        url: of Redis.
        inboxes: where each session's frames go; one for all of them is enough (an echo).
        outboxes: where the replies come from.
        frames: encoded frames, pushed in turn.
        rate_hz: frames a second of all sessions together.
        seconds: how long, the warm-up included.
        warm_s: frames due before are pushed and not counted.
        first_id: the first frame's id; later ones count up from it.
        sessions: how many; one an inbox by default.
        grace_s: how long replies are waited for after the last frame was due.
        seed: of the schedule.
    """
    due, who = schedule(sessions or len(inboxes), rate_hz, seconds, seed)
    count, counted = len(due), int(np.searchsorted(due, warm_s))
    sent, heard = np.full(count, np.inf), np.full(count, np.inf)
    push, replies = Connection(url), _Replies(url, outboxes, first_id)
    waiting = [push, *replies.sockets]
    gc.collect()
    gc.freeze()
    gc.disable()  # its pauses would be the instrument's own
    try:
        due = due + time.perf_counter() + 0.05
        ends = due[-1] + grace_s
        at, answered = 0, 0
        while answered < count:
            now = time.perf_counter()
            if at < count and due[at] <= now:
                until = int(np.searchsorted(due, now, "right"))
                commands = [
                    pack(
                        *("XADD", inboxes[who[n] % len(inboxes)], f"{first_id + n}-0"),
                        *("frame", frames[n % len(frames)]),
                    )
                    for n in range(at, until)
                ]
                push.send(b"".join(commands))
                sent[at:until] = time.perf_counter()
                at = until
                continue
            timeout = (due[at] if at < count else ends) - now
            if timeout <= 0:
                break
            readable, _, _ = select.select(waiting, [], [], timeout)
            if push in readable:
                push.ready()
            numbers = replies.take(readable)
            if numbers:
                heard[numbers] = time.perf_counter()
                answered += len(numbers)
    finally:
        gc.enable()
        gc.unfreeze()
        push.close()
        replies.close()
    return Heard(1e3 * (heard - due)[counted:], 1e3 * (sent - due)[counted:])
