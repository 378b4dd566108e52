"""The sessions a worker hosts: entries in, rounds through the engine, answers out. No Redis.

A round is the oldest waiting entry of every session that has one. The state of a session is
always that after the last of its `answers`, so whoever publishes those may checkpoint it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic

import numpy as np

from slotstream.codec import FrameCodec
from slotstream.named import AnyFrames, NamedFrames
from slotstream_worker.engine import catchup
from slotstream_worker.engine.engine import Engine, Failed, Flight, Ran
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.engine.pool import Session
from slotstream_worker.engine.rows import Rows
from slotstream_worker.entries import AnswerWriter, Entry, EntryReader, Frames
from slotstream_worker.hosted import Hosted
from slotstream_worker.store.commits import Answer, raw_id
from slotstream_worker.store.inbox import Raw
from slotstream_worker.store.table import Row
from slotstream_worker.weights.residents import Residents

log = logging.getLogger(__name__)

MayRun = Callable[[int, str], bool]
"""Asked with a suspect's partition and name before it runs alone, so that Redis knows."""


@dataclass
class Round:
    """What one round runs: entries with a frame, and entries that need no device.

    `hosted`, `ids` and `raws` stand side by side: sessions, and the id and encoded frame of the
    entry of each that runs. `entries` holds those among them, by place, that say more than a frame.
    With a `depth` of more than 1, `ids` and `raws` hold so many entries of each session in turn.
    """

    hosted: list[Hosted] = field(default_factory=list)
    ids: list[bytes] = field(default_factory=list)
    raws: list[bytes] = field(default_factory=list)
    entries: dict[int, Entry] = field(default_factory=dict)
    depth: int = 1
    plain: list[tuple[Hosted, Entry]] = field(default_factory=list)

    def steps(self, frame: int) -> list[int] | None:
        """How many of each frame's steps are real, where one has fewer than `frame`."""
        short = {k: one.steps for k, one in self.entries.items() if 0 < one.steps < frame}
        return [short.get(k, frame) for k in range(len(self.hosted))] if short else None

    def __bool__(self) -> bool:
        return bool(self.hosted or self.plain)

    def __len__(self) -> int:
        return len(self.hosted)


@dataclass(frozen=True)
class Flying:
    """A round under way on the device; no `flight` where it could not be launched."""

    round: Round
    names: list[str]
    frames: Frames
    from_rest: set[str]
    flight: Flight | None


class Host:
    """Sessions of all partitions on one engine, `max_sessions` of them at most."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_sessions: int,
        max_frame_bytes: int,
        finite: bool = False,
        read_ahead: int = 16,
        round_wait_s: float = 0.0,
        round_rows: int = 0,
    ) -> None:
        model = engine.model
        self.engine, self.max_sessions = engine, max_sessions
        self.rows = Rows(engine.pool)
        self.residents = Residents(engine)
        self.frames = _codec(model, max_frame_bytes)
        self.reader = EntryReader(
            self.frames, finite=finite, short=model.pick is None or model.pick.short
        )
        self.writer = AnswerWriter(model)
        self.hosted: dict[str, Hosted] = {}
        self._of: dict[int, dict[str, Hosted]] = {}
        self._acting: dict[int, dict[str, Hosted]] = {}
        self._hungry: dict[int, dict[str, Hosted]] = {}
        self._ready: deque[Hosted] = deque()  # have entries waiting; who ran last comes last
        self._suspects: dict[str, Hosted] = {}
        self._trial: Hosted | None = None
        self._suspect_next = self._publish_first = False
        self._in_flight = 0
        self._round_wait_s, self._round_rows = round_wait_s, round_rows
        self._ready_since = 0.0
        self.low_water = read_ahead // 4
        """Entries that wait of a session when the next are asked for."""
        self.read_count = max(read_ahead - self.low_water, 1)

    def __len__(self) -> int:
        return len(self.hosted)

    def of(self, partition: int) -> dict[str, Hosted]:
        """Sessions of one partition."""
        return self._of.setdefault(partition, {})

    def acting(self, partition: int) -> dict[str, Hosted]:
        """Sessions of one partition with answers or an action to commit."""
        return self._acting.setdefault(partition, {})

    def hungry(self, partition: int) -> dict[str, Hosted]:
        """Sessions of one partition whose stream is to be read on."""
        return self._hungry.setdefault(partition, {})

    @property
    def has_work(self) -> bool:
        """Whether a round could be formed now."""
        return any(hosted.runnable for hosted in self._ready) or any(
            self._on_trial(hosted) for hosted in self._suspects.values()
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
                base=raw_id(row.done),
                read_to=raw_id(row.done),
                weights=row.weights or self.residents.current,
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
            else:
                self.residents.adopt(hosted)
            self.hosted[row.session] = self.of(partition)[row.session] = hosted
            if hosted.suspect:
                self._suspects[row.session] = hosted
            self.acting(partition)
            self.hungry(partition)[row.session] = hosted
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
        entries = [(raw, entry) for raw in raws if not (entry := self.reader.read(*raw)).mark]
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
        skipped = set(map(raw_id, row.skipped))
        hosted.queue.extend(
            raw for raw, entry in entries if entry.id not in skipped and not entry.error
        )
        hosted.unsettled = len(hosted.queue)
        hosted.even = all(len(fields) == 2 and fields[0] == b"frame" for _, fields in hosted.queue)
        self._list(hosted)

    def drop(self, dropped: Iterable[Hosted]) -> None:
        """Forget sessions that are another's, or over; their rows are zeroed."""
        gone = [h for h in dropped if self.hosted.get(h.session) is h]
        for hosted in gone:
            hosted.gone = True
            self.residents.drop(hosted)
            del self.hosted[hosted.session]
            for held in (
                self._suspects,
                self.of(hosted.partition),
                self.acting(hosted.partition),
                self.hungry(hosted.partition),
            ):
                held.pop(hosted.session, None)
        self.rows.drop([hosted.session for hosted in gone])

    def finish(self, hosted: Hosted, action: str, reason: str = "", mark: str = "") -> None:
        """Run no more of a session; what is answered is committed, and then `action` is taken."""
        if not hosted.action:
            hosted.action, hosted.reason, hosted.mark = action, reason, mark
            hosted.queue.clear()
            self.acting(hosted.partition)[hosted.session] = hosted

    def changed_weights(self, hosted: Hosted, weights: str) -> None:
        """Its checkpoint is on its way, and names the version that runs everything after it."""
        if weights != hosted.weights:
            if self.residents.policy == "reset":
                self.rows.reset(hosted.session)
            self.residents.changed(hosted, weights)
            self.wake([hosted])

    def wake(self, sessions: Iterable[Hosted]) -> None:
        """Run sessions again that were halted."""
        for hosted in sessions:
            hosted.halt = ""
            self._list(hosted)

    def resume(self, sessions: Iterable[Hosted]) -> None:
        """Run sessions again that were paused for their reader."""
        for hosted in sessions:
            hosted.paused = False
            self._list(hosted)

    def _list(self, hosted: Hosted) -> None:
        """Let a session run again, behind all others, where it has something to run."""
        if hosted.listed or hosted.suspect or not hosted.runnable or hosted.gone:
            return
        hosted.listed = True
        if not self._ready:
            self._ready_since = monotonic()
        self._ready.append(hosted)

    @property
    def wait_s(self) -> float:
        """Seconds that the next round still waits for more sessions to have a frame."""
        if not self._round_wait_s or not self._ready:
            return 0.0
        enough = min(self._round_rows or self.engine.round_rows, len(self.hosted))
        if len(self._ready) >= enough:
            return 0.0
        return max(self._ready_since + self._round_wait_s - monotonic(), 0.0)

    # Entries in

    def changed(self, partition: int, sessions: Iterable[str]) -> None:
        """Note that the sessions' streams may hold entries that have not been read."""
        held, hungry = self.of(partition), self.hungry(partition)
        for session in sessions:
            hosted = held.get(session)
            if hosted is not None:
                hosted.more = True
                if len(hosted.queue) <= self.low_water or self._untried(hosted):
                    hungry[session] = hosted

    def _untried(self, hosted: Hosted) -> bool:
        """Whether it is a suspect with nothing to be tried on: an entry that nobody answered."""
        return hosted.suspect and len(hosted.queue) <= hosted.unsettled

    def to_read(self, partition: int, most: int) -> dict[str, Hosted]:
        """Sessions whose streams are to be read now, `most` at most; they count as read."""
        hungry = self.hungry(partition)
        found = {}
        for session in list(islice(hungry, most)):
            hosted = hungry.pop(session)
            if not (hosted.held or hosted.action == "end"):
                hosted.more = False
                found[session] = hosted
        return found

    def feed(self, hosted: Hosted, raws: Sequence[Raw]) -> None:
        """Take in entries read from a session's stream, in its order."""
        hosted.read_to = raws[-1][0]
        hosted.active_at = monotonic()
        if len(raws) >= self.read_count:
            hosted.more = True
        if hosted.action:
            return
        if any(len(fields) != 2 or fields[0] != b"frame" for _, fields in raws):
            for raw in raws:
                entry = self.reader.read(*raw)
                if entry.mark:
                    # Seen is enough: what waits is cancelled, what is in flight is answered.
                    self.finish(hosted, "end", "close", entry.id.decode())
                    return
                hosted.queue.append(raw)
            hosted.even = False
        else:
            hosted.queue.extend(raws)
        if hosted.more and len(hosted.queue) <= self.low_water:
            self.hungry(hosted.partition)[hosted.session] = hosted
        self._list(hosted)

    # Rounds

    def form(
        self, *, may_run: MayRun = lambda _partition, _session: True, quiet: bool = True
    ) -> Round:
        """The oldest waiting entry of sessions that have one, `round_rows` of them at most.

        A suspect runs alone, from its replay to its first answer, after everything before it has
        been published and before anything after it runs: if it kills this worker, no other
        session's work dies with it, and no other session's frame is what it is blamed for.

        Args:
            may_run: asked before a suspect is tried.
            quiet: nothing is on its way to Redis, so that a suspect may be tried.
        """
        tried = self._trial
        if tried and not self._on_trial(tried) and (tried.gone or not tried.in_flight):
            self._trial = None
            self._publish_first = True
        calm = quiet and not self._in_flight and not any(self._acting.values())
        if self._publish_first or self._trial:
            if not calm:
                return Round()
            self._publish_first = False
        if self._trial:
            return self._alone(self._trial)
        if self._suspect_next:
            suspects = [h for h in self._suspects.values() if self._on_trial(h)]
            if suspects:
                if not calm:
                    self._publish_first = True
                    return Round()
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
            and len(hosted.queue) > hosted.unsettled
            and not hosted.gone
        )

    def _alone(self, suspect: Hosted) -> Round:
        formed = Round()
        self._add(formed, suspect)
        return formed

    def _together(self) -> Round:
        if self.wait_s:
            return Round()
        ready, self._ready_since = self._ready, monotonic()
        room = self.engine.pool.slots - self._in_flight
        formed = self._far(min(self.engine.catch_up_rows, room))
        if formed:
            return formed
        limit = min(self.engine.round_rows, room)
        for _ in range(len(ready)):
            if len(formed.hosted) >= limit:
                break
            hosted = ready.popleft()
            hosted.listed = False
            if hosted.runnable and not hosted.gone:
                self._add(formed, hosted)
        return formed

    def _far(self, limit: int) -> Round:
        """Several frames each of sessions that have them waiting, where those would fill a launch.

        Empty where they would not, or where the first in line has fewer.
        """
        depth, formed = catchup.FRAMES, Round(depth=catchup.FRAMES)
        if limit < 1 or len(self._ready) < limit or not self.engine.catch_up_rows:
            return Round()
        chosen: list[Hosted] = []
        for hosted in self._ready:
            if (
                len(hosted.queue) >= depth
                and hosted.even
                and (not chosen or hosted.weights == chosen[0].weights)
                and hosted.runnable
                and not hosted.gone
                and self.rows.has_state(hosted.session)
            ):
                chosen.append(hosted)
                if len(chosen) == limit:
                    break
            elif not chosen:
                return Round()  # whoever is first in line is not passed over
        if not chosen or 2 * len(chosen) < self.engine.catch_up_rows:
            return Round()
        for hosted in chosen:
            hosted.listed, hosted.in_flight = False, True
            for _ in range(depth):
                id_, fields = hosted.queue.popleft()
                formed.ids.append(id_)
                formed.raws.append(fields[1])
            if hosted.more and len(hosted.queue) <= self.low_water:
                self.hungry(hosted.partition)[hosted.session] = hosted
        formed.hosted = chosen
        taken = set(chosen)
        self._ready = deque(hosted for hosted in self._ready if hosted not in taken)
        return formed

    def _add(self, formed: Round, hosted: Hosted) -> None:
        """Take the session's oldest entry into a round."""
        id_, fields = hosted.queue.popleft()
        hosted.in_flight = True
        if not hosted.queue:
            hosted.even = True
        if hosted.more and len(hosted.queue) <= self.low_water:
            self.hungry(hosted.partition)[hosted.session] = hosted
        if len(fields) == 2 and fields[0] == b"frame":
            formed.hosted.append(hosted)
            formed.ids.append(id_)
            formed.raws.append(fields[1])
            return
        entry = self.reader.read(id_, fields)
        if entry.payload is None:
            formed.plain.append((hosted, entry))
        else:
            formed.entries[len(formed.hosted)] = entry
            formed.hosted.append(hosted)
            formed.ids.append(id_)
            formed.raws.append(self.frames.usual(entry.payload))

    def launch(self, formed: Round) -> Flying:
        """Start a round; the device computes while the caller does something else.

        Entries whose frame turns out to be none go to those that need no device.
        """
        self._in_flight += len(formed.hosted) + len(formed.plain)
        if not formed.hosted:
            return Flying(formed, [], np.empty(0), set(), None)
        frames, others = self.reader.frames_of(formed.raws)
        if formed.depth > 1:
            return self._launch_far(formed, frames, others)
        if others:
            frames = self._sort_out(formed, frames, others)
        names = [hosted.session for hosted in formed.hosted]
        from_rest = {names[k] for k, entry in formed.entries.items() if entry.reset}
        flying = Flying(formed, names, frames, from_rest, None)
        if not names:
            return flying
        try:
            self.rows.seat(names, self._busy)
            steps = formed.steps(self.frames.shape[0])
            weights = self.residents.of(formed.hosted)
            flight = self.engine.begin(
                names, frames, from_rest=from_rest, steps=steps, weights=weights
            )
        except Exception:
            log.exception("a round of %d frames could not be launched", len(names))
            return flying  # `collect` runs it again, halved until each failure stands alone
        return Flying(formed, names, frames, from_rest, flight)

    def _launch_far(self, formed: Round, frames: Frames, others: Sequence[int]) -> Flying:
        if others:
            self._one_by_one(formed)
            return Flying(formed, [], frames, set(), None)
        names = [hosted.session for hosted in formed.hosted]
        try:
            self.rows.seat(names, self._busy)
            shape = (len(names), formed.depth, *self.frames.shape)
            weights = formed.hosted[0].weights
            flight = self.engine.begin_far(names, frames.reshape(shape), weights)
        except Exception:
            log.exception("a round of %d sessions could not be launched", len(names))
            self._one_by_one(formed)
            return Flying(formed, [], frames, set(), None)
        return Flying(formed, names, frames, set(), flight)

    def _one_by_one(self, formed: Round) -> None:
        """Put a round's entries back; they run a frame at a time, where each can fail alone."""
        for k, hosted in reversed(list(enumerate(formed.hosted))):
            part = slice(k * formed.depth, (k + 1) * formed.depth)
            raws = zip(formed.ids[part], formed.raws[part], strict=True)
            hosted.queue.extendleft(reversed([[id_, [b"frame", raw]] for id_, raw in raws]))
            hosted.in_flight = hosted.even = False
            if not hosted.gone and hosted.runnable and not hosted.listed:
                hosted.listed = True
                self._ready.appendleft(hosted)
        self._in_flight -= len(formed.hosted)
        formed.hosted = []

    def _busy(self, session: Session) -> bool:
        hosted = self.hosted.get(str(session))
        return hosted is not None and hosted.in_flight

    def _sort_out(self, formed: Round, frames: Frames, others: Sequence[int]) -> Frames:
        """Read the frames that are not encoded as usual; those that are none leave the round."""
        frames = frames.copy()
        bad = set()
        for k in others:
            raw = formed.raws[k]
            entry = formed.entries.get(k) or self.reader.read(formed.ids[k], [b"frame", raw])
            if entry.payload is None:
                bad.add(k)
                formed.plain.append((formed.hosted[k], entry))
            else:
                data = np.frombuffer(entry.payload, self.frames.dtype)
                frames[k] = data.reshape(self.frames.shape)
        if not bad:
            return frames
        keep = [k for k in range(len(formed.hosted)) if k not in bad]
        formed.entries = {
            new: formed.entries[k] for new, k in enumerate(keep) if k in formed.entries
        }
        formed.hosted = [formed.hosted[k] for k in keep]
        formed.ids = [formed.ids[k] for k in keep]
        formed.raws = [formed.raws[k] for k in keep]
        return frames[keep]

    def collect(self, flying: Flying) -> int:
        """Wait for a round; its rows and answers are then there. Returns how many frames ran."""
        formed = flying.round
        for outcome in self._outcomes(flying):
            if isinstance(outcome, Ran):
                self._ran(formed, outcome)
            else:
                self._failed(formed, outcome.position, outcome.error)
        for hosted, entry in formed.plain:
            self._plain(hosted, entry)
        self._in_flight -= len(formed.hosted) + len(formed.plain)
        return len(formed.hosted) * formed.depth

    def _outcomes(self, flying: Flying) -> Iterable[Ran | Failed]:
        """What each launch gave, or each frame that raised when it ran alone."""
        if flying.flight is not None:
            try:
                return self.engine.finish(flying.flight)
            except Exception:
                log.exception("a round of %d sessions failed; it is run again", len(flying.names))
            if flying.round.depth > 1:
                self._one_by_one(flying.round)
                return ()
        if not flying.names:
            return ()
        keep = [k for k, hosted in enumerate(flying.round.hosted) if not hosted.gone]
        names = [flying.names[k] for k in keep]
        steps = flying.round.steps(self.frames.shape[0])
        return self.engine.isolate(
            names,
            flying.frames[keep],
            from_rest=flying.from_rest,
            positions=keep,
            steps=[steps[k] for k in keep] if steps else None,
            weights=[flying.round.hosted[k].weights for k in keep],
        )

    def _ran(self, formed: Round, ran: Ran) -> None:
        now = monotonic()
        if formed.depth > 1:
            self._ran_far(formed, ran, now)
            return
        outputs = self.writer.outputs(ran.outputs)
        for row, (k, output) in enumerate(zip(ran.positions, outputs, strict=True)):
            hosted = formed.hosted[k]
            if hosted.gone:
                continue
            if hosted.unsettled or k in formed.entries:
                entry = formed.entries.get(k) or Entry(formed.ids[k], b"")
                if 0 < entry.steps < self.frames.shape[0]:
                    output = self.writer.cut(ran.outputs, row, entry.steps)
                self._answered(hosted, entry, self.writer.output(entry, output, hosted.weights))
                continue
            hosted.in_flight = False
            hosted.active_at = now
            if hosted.attempts:
                self._cleared(hosted)
            hosted.answers.append((formed.ids[k], output))
            self._acting[hosted.partition][hosted.session] = hosted
            if hosted.queue:
                self._list(hosted)

    def _ran_far(self, formed: Round, ran: Ran, now: float) -> None:
        depth = formed.depth
        outputs = self.writer.outputs(
            {
                name: array.reshape(len(array) * depth, *array.shape[2:])
                for name, array in ran.outputs.items()
            }
        )
        answers = list(zip(formed.ids, outputs, strict=True))
        for k, hosted in enumerate(formed.hosted):
            if hosted.gone:
                continue
            start = k * depth
            replayed = min(hosted.unsettled, depth)
            hosted.unsettled -= replayed
            hosted.in_flight = False
            if replayed < depth:
                if hosted.attempts:
                    self._cleared(hosted)
                hosted.active_at = now
                hosted.answers += answers[start + replayed : start + depth]
                self._acting[hosted.partition][hosted.session] = hosted
            self._list(hosted)

    def _failed(self, formed: Round, k: int, error: Exception) -> None:
        hosted = formed.hosted[k]
        if hosted.gone:
            return
        if hosted.unsettled:
            # It ran before, so it can run: not an error, but not here.
            log.error("session %s: its replay fails here (%s); handed back", hosted.session, error)
            hosted.in_flight = False
            self.finish(hosted, "handback")
            return
        entry = formed.entries.get(k) or Entry(formed.ids[k], b"")
        text = f"the model raised on this frame: {type(error).__name__}: {error}"
        self._answered(hosted, entry, self.writer.error(entry, "launch_failed", text))

    def _plain(self, hosted: Hosted, entry: Entry) -> None:
        if hosted.gone:
            return
        if entry.error:
            answer = self.writer.error(entry, entry.error.code, str(entry.error))
        else:
            answer = self.writer.op(entry)
            if entry.reset:
                self.rows.reset(hosted.session)
        self._answered(hosted, entry, answer)

    def _answered(self, hosted: Hosted, entry: Entry, answer: Answer) -> None:
        hosted.in_flight = False
        if hosted.unsettled:
            hosted.unsettled -= 1  # answered by an owner before
        else:
            if hosted.attempts:
                self._cleared(hosted)
            hosted.active_at = monotonic()
            hosted.answers.append(answer)
            hosted.usual = False
            self.acting(hosted.partition)[hosted.session] = hosted
            if entry.end:
                hosted.queue.clear()
                # Whatever else was to become of it: its stream ends with this very answer.
                hosted.action, hosted.reason, hosted.mark = "end", "end", ""
        self._list(hosted)

    def _cleared(self, hosted: Hosted) -> None:
        """It has been answered: it kills nobody."""
        hosted.attempts = 0
        self._suspects.pop(hosted.session, None)


def _codec(model: StreamModel, max_bytes: int) -> AnyFrames:
    """The codec of a model's frames."""
    if model.inputs:
        inputs = {one.name: (one.dtype.name, one.shape) for one in model.inputs}
        return NamedFrames(inputs, model.frame, max_bytes=max_bytes)
    return FrameCodec(model.dtype.name, model.frame_shape, max_bytes=max_bytes)
