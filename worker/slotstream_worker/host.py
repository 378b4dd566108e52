"""The sessions a worker hosts: entries in, rounds through the engine, answers out. No Redis.

A round is the oldest waiting entry of every session that has one. The state of a session is
always that after the last of its `answers`, so whoever publishes those may checkpoint it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from slotstream.codec import FrameCodec
from slotstream.ids import EntryId
from slotstream_worker.engine.engine import Engine, Failed, Flight, Ran
from slotstream_worker.entries import AnswerWriter, Entry, EntryReader
from slotstream_worker.store.inbox import Raw
from slotstream_worker.store.table import Answer, Row

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Hosted:
    """One session here, under one epoch.

    `base` is the id of the last entry whose answer Redis has, `position` that of the last entry
    that ran, `read_to` that of the last entry read. Entries up to `replay_to` have been answered
    by an owner before: they run again, and nothing is published. `paused`: its reader is behind,
    and it asked that no reply be lost. `held`: why it cannot run here at all; nothing of it is
    changed, and it goes to another worker when this one drains.
    """

    session: str
    epoch: bytes
    cuts: bytes
    base: EntryId
    position: EntryId
    read_to: EntryId
    replay_to: EntryId
    weights: str
    queue: deque[Entry] = field(default_factory=deque)
    answers: list[Answer] = field(default_factory=list)
    in_flight: bool = False
    paused: bool = False
    held: str = ""
    action: str = ""
    reason: str = ""
    mark: str = ""

    @property
    def settled(self) -> bool:
        """Whether the row on the device is the state after the last answer."""
        return self.position >= self.replay_to and not self.held

    @property
    def runnable(self) -> bool:
        """Whether its oldest entry may go into a round."""
        return bool(self.queue) and not (self.action or self.in_flight or self.paused or self.held)


@dataclass(frozen=True)
class Round:
    """What one round runs: entries with a frame, and entries that need no device."""

    framed: list[tuple[Hosted, Entry]]
    plain: list[tuple[Hosted, Entry]]

    def __bool__(self) -> bool:
        return bool(self.framed or self.plain)


@dataclass(frozen=True)
class Flying:
    """A round under way on the device."""

    round: Round
    frames: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
    flight: Flight | None

    @property
    def from_rest(self) -> set[str]:
        """Sessions that a reset puts at rest before their frame."""
        return {hosted.session for hosted, entry in self.round.framed if entry.reset}


class Host:
    """Sessions on an engine, `max_sessions` of them at most."""

    def __init__(self, engine: Engine, *, max_frame_bytes: int, finite: bool = False) -> None:
        model = engine.model
        self.engine = engine
        self.frames = FrameCodec(model.dtype.name, model.frame_shape, max_bytes=max_frame_bytes)
        self.reader = EntryReader(self.frames, finite=finite)
        self.writer = AnswerWriter(model)
        self.hosted: dict[str, Hosted] = {}
        self._ready: dict[str, Hosted] = {}  # have entries waiting; in order of arrival
        self.acting: dict[str, Hosted] = {}
        """Sessions with answers or an action to commit."""

    @property
    def has_work(self) -> bool:
        """Whether a round could be formed now."""
        return any(hosted.runnable for hosted in self._ready.values())

    @property
    def room(self) -> int:
        """Sessions that can still be taken."""
        return self.engine.pool.free

    # Sessions come and go

    def adopt(self, rows: Sequence[Row]) -> list[Hosted]:
        """Take claimed sessions in, each on its own checkpoint; an older epoch's copy goes."""
        self.drop(self.hosted[row.session] for row in rows if row.session in self.hosted)
        pool = self.engine.pool
        if not pool.admit(row.session for row in rows):
            raise RuntimeError(f"{len(rows)} sessions were claimed with room for {pool.free}")
        adopted, states = [], {}
        for row in rows:
            hosted = Hosted(
                row.session,
                row.epoch,
                row.cuts,
                base=row.done,
                position=row.cursor,
                read_to=row.done,
                replay_to=row.done,
                weights=row.weights,
            )
            if row.state and row.layout != self.engine.model.spec.layout:
                hosted.held = (
                    f"its checkpoint has the layout {row.layout}, and this model's "
                    f"state {self.engine.model.spec.layout}"
                )
                log.error("session %s is left as it is: %s", row.session, hosted.held)
            else:
                states[row.session] = row.state
            self.hosted[row.session] = hosted
            adopted.append(hosted)
        pool.write(states)
        return adopted

    def replay(self, hosted: Hosted, row: Row, raws: Iterable[Raw]) -> None:
        """Queue what came after the checkpoint and has been answered, to run without publishing.

        Finding fewer entries than were answered ends the session: its outputs would be silently
        different.
        """
        if hosted.held:
            return
        entries = [entry for id_, raw in raws if not (entry := self.reader.read(id_, raw)).mark]
        if len(entries) < row.count:
            log.error(
                "session %s: %d entries were answered after its checkpoint and %d are left; "
                "it ends with replay_gap",
                row.session,
                row.count,
                len(entries),
            )
            self.finish(hosted, "end", "replay_gap")
            return
        hosted.queue.extend(
            entry for entry in entries if entry.id not in row.skipped and not entry.error
        )
        if hosted.queue:
            self._ready[hosted.session] = hosted
            hosted.replay_to = hosted.queue[-1].id
        else:
            hosted.position = hosted.base

    def drop(self, dropped: Iterable[Hosted]) -> None:
        """Forget sessions that are another's, or over; their rows are zeroed."""
        gone = [h for h in dropped if self.hosted.get(h.session) is h]
        for hosted in gone:
            del self.hosted[hosted.session]
            self._ready.pop(hosted.session, None)
            self.acting.pop(hosted.session, None)
        self.engine.pool.release([hosted.session for hosted in gone])

    def finish(self, hosted: Hosted, action: str, reason: str = "", mark: str = "") -> None:
        """Run no more of a session; what is answered is committed, and then `action` is taken."""
        if not hosted.action:
            hosted.action, hosted.reason, hosted.mark = action, reason, mark
            hosted.queue.clear()
            self.acting[hosted.session] = hosted

    def resume(self, sessions: Iterable[Hosted]) -> None:
        """Run sessions again that were paused for their reader."""
        for hosted in sessions:
            hosted.paused = False
            if hosted.queue and self.hosted.get(hosted.session) is hosted:
                self._ready[hosted.session] = hosted

    # Entries in

    def feed(self, session: str, raws: Iterable[Raw]) -> int:
        """Take in entries read from a session's stream; returns how many will be run."""
        hosted = self.hosted[session]
        taken = 0
        for id_, raw in raws:
            hosted.read_to = id_
            if hosted.action:
                continue
            entry = self.reader.read(id_, raw)
            if entry.mark:
                # Seen is enough: what waits is cancelled, what is in flight is still answered.
                self.finish(hosted, "end", "close", str(id_))
            else:
                hosted.queue.append(entry)
                taken += 1
        if hosted.queue:
            self._ready[session] = hosted
        return taken

    # Rounds

    def form(self) -> Round:
        """The oldest waiting entry of every session that has one."""
        framed: list[tuple[Hosted, Entry]] = []
        plain: list[tuple[Hosted, Entry]] = []
        for session, hosted in list(self._ready.items()):
            if not hosted.runnable:
                if not hosted.queue:
                    del self._ready[session]
                continue
            entry = hosted.queue.popleft()
            hosted.in_flight = True
            (plain if entry.payload is None else framed).append((hosted, entry))
        return Round(framed, plain)

    def launch(self, formed: Round) -> Flying:
        """Start a round; the device computes while the caller does something else."""
        frames = self._stack([entry for _, entry in formed.framed])
        flying = Flying(formed, frames, None)
        if not formed.framed:
            return flying
        names = [hosted.session for hosted, _ in formed.framed]
        try:
            flight = self.engine.begin(names, frames, from_rest=flying.from_rest)
        except Exception:
            log.exception("a round of %d frames could not be launched", len(names))
            return flying  # `collect` runs it again, halved until each failure stands alone
        return Flying(formed, frames, flight)

    def collect(self, flying: Flying) -> int:
        """Wait for a round; its rows and answers are then there. Returns how many frames ran."""
        formed = flying.round
        entries = {
            hosted.session: (hosted, entry)
            for hosted, entry in formed.framed
            if self.hosted.get(hosted.session) is hosted
        }
        for session, outcome in self._outcomes(flying, entries):
            hosted, entry = entries[session]
            if isinstance(outcome, Answer):
                self._answered(hosted, entry, outcome)
            elif entry.id <= hosted.replay_to:
                # It ran before, so it can run: not an error, but not here.
                log.error("session %s: its replay fails here (%s); handed back", session, outcome)
                hosted.in_flight = False
                self.finish(hosted, "handback")
            else:
                self._answered(
                    hosted,
                    entry,
                    self.writer.error(
                        entry,
                        "launch_failed",
                        f"the model raised on this frame: {type(outcome).__name__}: {outcome}",
                    ),
                )
        for hosted, entry in formed.plain:
            if self.hosted.get(hosted.session) is hosted:
                self._plain(hosted, entry)
        return len(formed.framed)

    def _outcomes(
        self, flying: Flying, entries: dict[str, tuple[Hosted, Entry]]
    ) -> Iterator[tuple[str, Answer | Exception]]:
        """Each session's answer, or what its frame raised when it ran alone."""
        if not flying.round.framed:
            return
        outcomes: Iterable[Ran | Failed] | None = None
        if flying.flight is not None:
            try:
                outcomes = self.engine.finish(flying.flight)
            except Exception:
                log.exception(
                    "a round of %d frames failed; it is run again", len(flying.round.framed)
                )
        if outcomes is None:
            keep = [
                k for k, (hosted, _) in enumerate(flying.round.framed) if hosted.session in entries
            ]
            names = [flying.round.framed[k][0].session for k in keep]
            outcomes = (
                self.engine.isolate(names, flying.frames[keep], from_rest=flying.from_rest)
                if names
                else ()
            )
        for outcome in outcomes:
            if isinstance(outcome, Failed):
                yield str(outcome.session), outcome.error
                continue
            for k, session in enumerate(map(str, outcome.sessions)):
                if session in entries:
                    row = {name: array[k] for name, array in outcome.outputs.items()}
                    yield session, self.writer.output(entries[session][1], row)

    def _plain(self, hosted: Hosted, entry: Entry) -> None:
        if entry.error:
            answer = self.writer.error(entry, entry.error.code, str(entry.error))
        else:
            answer = self.writer.op(entry)
            if entry.reset:
                self.engine.pool.reset(hosted.session)
        self._answered(hosted, entry, answer)

    def _answered(self, hosted: Hosted, entry: Entry, answer: Answer) -> None:
        hosted.in_flight = False
        hosted.position = entry.id
        if entry.id <= hosted.replay_to:
            return  # answered by an owner before
        hosted.answers.append(answer)
        self.acting[hosted.session] = hosted
        if entry.end:
            hosted.queue.clear()
            # Whatever else was to become of it: its stream ends with this very answer.
            hosted.action, hosted.reason, hosted.mark = "end", "end", ""

    def _stack(self, entries: Sequence[Entry]) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        """Frames `[entries, frame, *sample_shape]` from their data bytes, joined in one copy."""
        joined = b"".join([entry.payload or b"" for entry in entries])
        frames = np.frombuffer(joined, self.frames.dtype)
        return frames.reshape(len(entries), *self.frames.shape)
