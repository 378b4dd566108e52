"""The sessions a worker hosts: entries in, rounds through the engine, answers out. No Redis.

A round is the oldest waiting entry of every session that has one. The state of a session is
always that after the last of its `answers`, so whoever publishes those may checkpoint it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

from slotstream.codec import FrameCodec
from slotstream_worker.engine.engine import Engine, Failed, Flight, Ran
from slotstream_worker.engine.rows import Rows
from slotstream_worker.entries import AnswerWriter, Entry, EntryReader
from slotstream_worker.hosted import Hosted
from slotstream_worker.store.inbox import Raw
from slotstream_worker.store.table import Answer, Row

log = logging.getLogger(__name__)

MayRun = Callable[[int, str], bool]
"""Asked with a suspect's partition and name before it runs alone, so that Redis knows."""


@dataclass(frozen=True)
class Round:
    """What one round runs: entries with a frame, and entries that need no device."""

    framed: list[tuple[Hosted, Entry]]
    plain: list[tuple[Hosted, Entry]]

    def __bool__(self) -> bool:
        return bool(self.framed or self.plain)

    def add(self, hosted: Hosted) -> None:
        """Take the session's oldest entry in."""
        entry = hosted.queue.popleft()
        hosted.in_flight = True
        (self.plain if entry.payload is None else self.framed).append((hosted, entry))


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
    """Sessions of all partitions on one engine, `max_sessions` of them at most."""

    def __init__(
        self, engine: Engine, *, max_sessions: int, max_frame_bytes: int, finite: bool = False
    ) -> None:
        model = engine.model
        self.engine, self.max_sessions = engine, max_sessions
        self.rows = Rows(engine.pool)
        self.frames = FrameCodec(model.dtype.name, model.frame_shape, max_bytes=max_frame_bytes)
        self.reader = EntryReader(self.frames, finite=finite)
        self.writer = AnswerWriter(model)
        self.hosted: dict[str, Hosted] = {}
        self._of: dict[int, dict[str, Hosted]] = {}
        self._acting: dict[int, dict[str, Hosted]] = {}
        self._ready: dict[str, Hosted] = {}  # have entries waiting; who ran last comes last
        self._trial: Hosted | None = None
        self._suspect_next = self._publish_first = False

    def __len__(self) -> int:
        return len(self.hosted)

    def of(self, partition: int) -> dict[str, Hosted]:
        """Sessions of one partition."""
        return self._of.setdefault(partition, {})

    def acting(self, partition: int) -> dict[str, Hosted]:
        """Sessions of one partition with answers or an action to commit."""
        return self._acting.setdefault(partition, {})

    @property
    def has_work(self) -> bool:
        """Whether a round could be formed now."""
        return any(
            self._on_trial(hosted) if hosted.suspect else hosted.runnable
            for hosted in self._ready.values()
        )

    @property
    def room(self) -> int:
        """Sessions that can still be taken."""
        return max(self.max_sessions - len(self.hosted), 0)

    # Sessions come and go

    def adopt(self, partition: int, rows: Sequence[Row]) -> list[Hosted]:
        """Take claimed sessions in, each on its own checkpoint; an older epoch's copy goes."""
        self.drop([self.hosted[row.session] for row in rows if row.session in self.hosted])
        model, adopted, states = self.engine.model, [], {}
        for row in rows:
            hosted = Hosted(
                row.session,
                partition,
                row.epoch,
                row.cuts,
                base=row.done,
                position=row.cursor,
                read_to=row.done,
                replay_to=row.done,
                weights=row.weights,
                attempts=row.attempts,
            )
            fits = not row.state or row.layout == model.spec.layout
            states[row.session] = row.state if fits else b""
            if not fits:
                hosted.held = (
                    f"its checkpoint has the layout {row.layout}, and this model's state "
                    f"{model.spec.layout}"
                )
                log.error("session %s is left as it is: %s", row.session, hosted.held)
            elif row.weights and row.weights != model.weights:
                log.warning(
                    "session %s ran with weights %s so far, and goes on with %s",
                    *(row.session, row.weights, model.weights),
                )
            self.hosted[row.session] = self.of(partition)[row.session] = hosted
            adopted.append(hosted)
        self.rows.hold(states)
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
            self.of(hosted.partition).pop(hosted.session, None)
            self.acting(hosted.partition).pop(hosted.session, None)
        self.rows.drop([hosted.session for hosted in gone])

    def finish(self, hosted: Hosted, action: str, reason: str = "", mark: str = "") -> None:
        """Run no more of a session; what is answered is committed, and then `action` is taken."""
        if not hosted.action:
            hosted.action, hosted.reason, hosted.mark = action, reason, mark
            hosted.queue.clear()
            self.acting(hosted.partition)[hosted.session] = hosted

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
            hosted.active_at = monotonic()
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

    def form(self, *, may_run: MayRun = lambda _partition, _session: True) -> Round:
        """The oldest waiting entry of every session that has one, of as many as have a slot.

        A suspect runs alone, from its replay to its first answer, after everything before it has
        been published and before anything after it runs: if it kills this worker, no other
        session's work dies with it, and no other session's frame is what it is blamed for.
        """
        if self._trial and not self._on_trial(self._trial):
            self._trial = None
            self._publish_first = True
        if self._publish_first or self._trial:
            if any(self._acting.values()):
                return Round([], [])
            self._publish_first = False
        if self._trial:
            return self._alone(self._trial)
        if self._suspect_next:
            suspects = [h for h in self._ready.values() if self._on_trial(h)]
            if suspects:
                if any(self._acting.values()):
                    self._publish_first = True
                    return Round([], [])
                self._suspect_next = False
                if may_run(suspects[0].partition, suspects[0].session):
                    self._trial = suspects[0]
                    return self._alone(suspects[0])
        self._suspect_next = True
        return self._together()

    def _on_trial(self, hosted: Hosted) -> bool:
        """Whether it is a suspect that can be tried: it has an entry that nobody has answered."""
        return (
            hosted.suspect
            and hosted.runnable
            and hosted.queue[-1].id > hosted.replay_to
            and self.hosted.get(hosted.session) is hosted
        )

    @staticmethod
    def _alone(suspect: Hosted) -> Round:
        formed = Round([], [])
        formed.add(suspect)
        return formed

    def _together(self) -> Round:
        formed, slots = Round([], []), self.engine.pool.slots
        for session, hosted in list(self._ready.items()):
            if not hosted.queue:
                del self._ready[session]
            elif hosted.runnable and not hosted.suspect and len(formed.framed) < slots:
                formed.add(hosted)
                # Behind those that have not run: rounds rotate where slots are few.
                del self._ready[session]
                self._ready[session] = hosted
        return formed

    def launch(self, formed: Round) -> Flying:
        """Start a round; the device computes while the caller does something else."""
        frames = self._stack([entry for _, entry in formed.framed])
        flying = Flying(formed, frames, None)
        if not formed.framed:
            return flying
        names = [hosted.session for hosted, _ in formed.framed]
        self.rows.seat(names)
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
                self.rows.reset(hosted.session)
        self._answered(hosted, entry, answer)

    def _answered(self, hosted: Hosted, entry: Entry, answer: Answer) -> None:
        hosted.in_flight = False
        hosted.position = entry.id
        if entry.id <= hosted.replay_to:
            return  # answered by an owner before
        hosted.attempts = 0  # it has been answered: it kills nobody
        hosted.active_at = monotonic()
        hosted.answers.append(answer)
        self.acting(hosted.partition)[hosted.session] = hosted
        if entry.end:
            hosted.queue.clear()
            # Whatever else was to become of it: its stream ends with this very answer.
            hosted.action, hosted.reason, hosted.mark = "end", "end", ""

    def _stack(self, entries: Sequence[Entry]) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        """Frames `[entries, frame, *sample_shape]` from their data bytes, joined in one copy."""
        joined = b"".join([entry.payload or b"" for entry in entries])
        frames = np.frombuffer(joined, self.frames.dtype)
        return frames.reshape(len(entries), *self.frames.shape)
