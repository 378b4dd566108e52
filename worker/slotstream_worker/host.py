"""The sessions a worker hosts: entries in, rounds through the engine, answers out. No Redis.

A round is the oldest waiting entry of every session that has one. The state of a session is
always that after the last of its `answers`, so whoever publishes those may checkpoint it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from time import monotonic

from slotstream.codec import FrameCodec
from slotstream.named import AnyFrames, NamedFrames
from slotstream_worker.answers import AnswerWriter, split
from slotstream_worker.engine.engine import Engine, Ran
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.engine.pool import Session
from slotstream_worker.engine.rows import Rows
from slotstream_worker.entries import Entry, EntryReader
from slotstream_worker.hosted import Hosted
from slotstream_worker.rounds import Flying, Round
from slotstream_worker.running import Runner
from slotstream_worker.scheduler import MayRun, Scheduler
from slotstream_worker.store.commits import Answer, raw_id
from slotstream_worker.store.inbox import Raw
from slotstream_worker.store.table import Row
from slotstream_worker.weights.residents import Residents

log = logging.getLogger(__name__)


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
        self.low_water = read_ahead // 4
        """Entries that wait of a session when the next are asked for."""
        self.scheduler = Scheduler(
            engine,
            self.rows,
            self.reader,
            low=self._low,
            low_water=self.low_water,
            wait_s=round_wait_s,
            enough=round_rows,
        )
        self._runner = Runner(
            engine,
            self.rows,
            self.reader,
            self.residents,
            busy=self._busy,
            put_back=self.scheduler.put_back,
        )

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
        return self.scheduler.has_work

    @property
    def wait_s(self) -> float:
        """Seconds that the next round still waits for more sessions to have a frame."""
        return self.scheduler.waits_for(len(self.hosted))

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
                self.scheduler.suspect(hosted)
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
        hosted.even = _only_frames(hosted.queue)
        self.scheduler.add(hosted)

    def drop(self, dropped: Iterable[Hosted]) -> None:
        """Forget sessions that are another's, or over; their rows are zeroed."""
        gone = [h for h in dropped if self.hosted.get(h.session) is h]
        for hosted in gone:
            hosted.gone = True
            self.residents.drop(hosted)
            del self.hosted[hosted.session]
            self.scheduler.forget(hosted)
            for held in (
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
            self.scheduler.add(hosted)

    def resume(self, sessions: Iterable[Hosted]) -> None:
        """Run sessions again that were paused for their reader."""
        for hosted in sessions:
            hosted.paused = False
            self.scheduler.add(hosted)

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

    def feed(self, hosted: Hosted, raws: Sequence[Raw], *, more: bool = False) -> None:
        """Take in entries read from a session's stream, in its order; `more` may be there."""
        hosted.read_to = raws[-1][0]
        hosted.active_at = monotonic()
        if more:
            hosted.more = True
        if hosted.action:
            return
        if not _only_frames(raws):
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
            self._low(hosted)
        self.scheduler.add(hosted)

    def _low(self, hosted: Hosted) -> None:
        """Read a session's stream on: little of it waits here, and more may wait there."""
        self.hungry(hosted.partition)[hosted.session] = hosted

    # Rounds

    def form(
        self, *, may_run: MayRun = lambda _partition, _session: True, calm: bool = True
    ) -> Round:
        """The round that is to run next; an empty one where there is none now.

        Args:
            may_run: asked before a suspect is tried.
            calm: nothing waits to be published, or is on its way to Redis, so that a suspect may
                be tried.
        """
        return self.scheduler.form(len(self.hosted), may_run, calm=calm)

    def launch(self, formed: Round) -> Flying:
        """Start a round; the device computes while the caller does something else."""
        return self._runner.launch(formed)

    def collect(self, flying: Flying) -> int:
        """Wait for a round; its rows and answers are then there. Returns how many frames ran."""
        formed = flying.round
        for outcome in self._runner.outcomes(flying):
            if isinstance(outcome, Ran):
                self._ran(formed, outcome)
            else:
                self._failed(formed, outcome.position, outcome.error)
        for hosted, entry in formed.plain:
            self._plain(hosted, entry)
        self.scheduler.landed(formed)
        return len(formed.hosted) * formed.depth

    def _busy(self, session: Session) -> bool:
        hosted = self.hosted.get(str(session))
        return hosted is not None and hosted.in_flight

    def _ran(self, formed: Round, ran: Ran) -> None:
        now = monotonic()
        if formed.depth > 1:
            self._ran_far(formed, ran, now)
            return
        ids = [formed.ids[k] for k in ran.positions]
        answers = self.writer.outputs(ids, ran.outputs)
        for row, (k, answer) in enumerate(zip(ran.positions, answers, strict=True)):
            hosted = formed.hosted[k]
            if hosted.gone:
                continue
            if hosted.unsettled or k in formed.entries:
                entry = formed.entries.get(k) or Entry(formed.ids[k], b"")
                if 0 < entry.steps < self.frames.shape[0]:
                    raw = self.writer.cut(ran.outputs, row, entry.steps)
                else:
                    raw = self.writer.raw(answer)
                self._answered(hosted, entry, self.writer.output(entry, raw, hosted.weights))
                continue
            hosted.in_flight = False
            hosted.active_at = now
            if hosted.attempts:
                self.scheduler.cleared(hosted)
            hosted.answers.append(answer)
            self._acting[hosted.partition][hosted.session] = hosted
            if hosted.queue:
                self.scheduler.add(hosted)

    def _ran_far(self, formed: Round, ran: Ran, now: float) -> None:
        depth = formed.depth
        outputs = {
            name: array.reshape(len(array) * depth, *array.shape[2:])
            for name, array in ran.outputs.items()
        }
        answers = self.writer.runs(formed.ids, outputs, depth)
        for hosted, those in zip(formed.hosted, answers, strict=True):
            if hosted.gone:
                continue
            replayed = min(hosted.unsettled, depth)
            hosted.unsettled -= replayed
            hosted.in_flight = False
            if replayed < depth:
                if hosted.attempts:
                    self.scheduler.cleared(hosted)
                hosted.active_at = now
                if replayed:
                    those = [one for some in those for one in split(some)][replayed:]
                hosted.answers += those
                self._acting[hosted.partition][hosted.session] = hosted
            self.scheduler.add(hosted)

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
                self.scheduler.cleared(hosted)
            hosted.active_at = monotonic()
            hosted.answers.append(answer)
            hosted.usual = False
            self.acting(hosted.partition)[hosted.session] = hosted
            if entry.end:
                hosted.queue.clear()
                # Whatever else was to become of it: its stream ends with this very answer.
                hosted.action, hosted.reason, hosted.mark = "end", "end", ""
        self.scheduler.add(hosted)


def _only_frames(raws: Sequence[Raw]) -> bool:
    """Whether none of the entries says more than a frame."""
    for _, fields in raws:  # noqa: SIM110 (a generator takes twice as long, and every entry passes)
        if len(fields) != 2 or fields[0] != b"frame":
            return False
    return True


def _codec(model: StreamModel, max_bytes: int) -> AnyFrames:
    """The codec of a model's frames."""
    if model.inputs:
        inputs = {one.name: (one.dtype.name, one.shape) for one in model.inputs}
        return NamedFrames(inputs, model.frame, max_bytes=max_bytes)
    return FrameCodec(model.dtype.name, model.frame_shape, max_bytes=max_bytes)
