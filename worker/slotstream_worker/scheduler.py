"""Whose frames run next, and with whom: the line of sessions that have entries waiting.

A round is the oldest waiting entry of every session that has one, in the order of the line, up to
the rows that are worth launching together. Sessions with several entries waiting run those in one
launch, where enough of them do to fill it: that costs less a frame, so a backlog is caught up with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic

from slotstream_worker.engine.catchup import CatchUp
from slotstream_worker.engine.engine import Engine
from slotstream_worker.engine.rows import Rows
from slotstream_worker.entries import EntryReader
from slotstream_worker.hosted import Hosted
from slotstream_worker.rounds import Round

MayRun = Callable[[int, str], bool]
"""Asked with a suspect's partition and name before it runs alone, so that Redis knows."""

_BEHIND = 2
"""Entries that wait of a session that is behind: it rather waits for a launch of several."""
_FRAME_US = 20.0
"""About what a session's part in a round costs beside the device, here and in Redis."""
_LOOK = 2
"""Launches' worth of sessions that are looked at to fill one."""


class Scheduler:
    """The line of the sessions that may run, and the suspects, which run alone.

    Args:
        engine: says how many rows are worth launching together.
        rows: says who has left rest.
        reader: reads the entries that are more than a frame.
        low: called with a session of whose entries one was taken, and few are left.
        low_water: how many are few.
        wait_s: how long a round waits for more sessions to have a frame.
        enough: of how many sessions it does not wait for more; 0: as many as are worth launching.
    """

    def __init__(
        self,
        engine: Engine,
        rows: Rows,
        reader: EntryReader,
        *,
        low: Callable[[Hosted], None],
        low_water: int,
        wait_s: float = 0.0,
        enough: int = 0,
    ) -> None:
        self.engine, self.rows, self.reader = engine, rows, reader
        self.in_flight = 0
        """Sessions with an entry in a round under way."""
        self._low, self._low_water = low, low_water
        self._ready: deque[Hosted] = deque()  # have entries waiting; who ran last comes last
        self._suspects: dict[str, Hosted] = {}
        self._trial: Hosted | None = None
        self._suspect_next = self._publish_first = False
        self._news = True  # since a round was last formed, or not
        self._catching_up = 0  # rounds under way that run several entries of a session
        self._wait_s, self._enough = wait_s, enough
        self._ready_since = 0.0

    # Who is in line

    def add(self, hosted: Hosted) -> None:
        """Let a session run, behind all others, where it has something to run.

        One that is in line already may have more of it.
        """
        self._news = True
        if hosted.listed or hosted.suspect or not hosted.runnable or hosted.gone:
            return
        hosted.listed = True
        if not self._ready:
            self._ready_since = monotonic()
        self._ready.append(hosted)

    def suspect(self, hosted: Hosted) -> None:
        """Run a session alone from now on, since it may be what killed its owners."""
        self._suspects[hosted.session] = hosted

    def cleared(self, hosted: Hosted) -> None:
        """A session has been answered: it kills nobody."""
        hosted.attempts = 0
        self._suspects.pop(hosted.session, None)

    def forget(self, hosted: Hosted) -> None:
        """A session is not held any more."""
        self._suspects.pop(hosted.session, None)

    @property
    def has_work(self) -> bool:
        """Whether a round could be formed now."""
        return any(hosted.runnable for hosted in self._ready) or any(
            self._on_trial(hosted) for hosted in self._suspects.values()
        )

    def waits_for(self, sessions: int) -> float:
        """Seconds that the next round still waits for more of `sessions` to have a frame."""
        if not self._wait_s or not self._ready:
            return 0.0
        enough = min(self._enough or self.engine.round_rows, sessions)
        if len(self._ready) >= enough:
            return 0.0
        return max(self._ready_since + self._wait_s - monotonic(), 0.0)

    # Rounds

    def form(self, sessions: int, may_run: MayRun, *, calm: bool) -> Round:
        """The next round; an empty one where there is none to be run now.

        A suspect runs alone, from its replay to its first answer, after everything before it has
        been published and before anything after it runs: if it kills this worker, no other
        session's work dies with it, and no other session's frame is what it is blamed for.

        Args:
            sessions: how many are held, of which a round may wait for more.
            may_run: asked before a suspect is tried.
            calm: nothing is to be published, or on its way to Redis, so that a suspect may be
                tried once no round is under way.
        """
        calm = calm and not self.in_flight
        tried = self._trial
        if tried and not self._on_trial(tried) and (tried.gone or not tried.in_flight):
            self._trial = None
            self._publish_first = True
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
        if self.waits_for(sessions):
            return Round()
        return self._together(sessions)

    def landed(self, formed: Round) -> None:
        """A round is not under way any more."""
        self.in_flight -= len(formed)
        self._catching_up -= formed.depth > 1
        self._news = True

    def put_back(self, formed: Round) -> None:
        """Put a round of several frames back; they run one by one, where each can fail alone."""
        for k, hosted in reversed(list(enumerate(formed.hosted))):
            part = slice(k * formed.depth, (k + 1) * formed.depth)
            raws = zip(formed.ids[part], formed.raws[part], strict=True)
            hosted.queue.extendleft(reversed([[id_, [b"frame", raw]] for id_, raw in raws]))
            hosted.in_flight = hosted.even = False
            if not hosted.gone and hosted.runnable and not hosted.listed:
                hosted.listed = True
                self._ready.appendleft(hosted)
        self.in_flight -= len(formed.hosted)
        self._news = True
        formed.hosted = []

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
        self.in_flight += len(formed)
        return formed

    def _together(self, sessions: int) -> Round:
        while self._ready and not self._in_line(self._ready[0]):
            self._ready.popleft().listed = False
        if not self._ready:
            return Round()
        room = self.engine.pool.slots - self.in_flight
        behind = bool(self.engine.catch_up) and self._is_behind(self._ready[0])
        # While others catch up, the device is busy: whoever is behind waits to fill a launch too.
        patient = self._catching_up > 0
        if patient and not self._news:
            return Round()  # nobody has come since they were too few
        formed = self._several(room, sessions, full=patient) if behind else Round()
        if not formed:
            limit = min(self.engine.round_rows, room)
            formed = self._one_each(limit, leave=patient or not behind, patient=patient)
        self._news = bool(formed)  # after one there may be another
        if formed:
            self._ready_since = monotonic()
        self.in_flight += len(formed)
        self._catching_up += formed.depth > 1
        return formed

    def _one_each(self, limit: int, *, leave: bool, patient: bool) -> Round:
        """The oldest entry of each of the first in line, `limit` of them at most.

        Args:
            limit: sessions.
            leave: leave those that are behind for a launch of several, where they fill one.
            patient: leave them even where they are too few.
        """
        formed, ready, ways = Round(), self._ready, self.engine.catch_up
        left: list[Hosted] = []
        most = _LOOK * ways[-1].rows if ways else 0
        for _ in range(len(ready)):
            if len(formed.hosted) >= limit or len(left) > most:
                break
            hosted = ready.popleft()
            if leave and ways and self._is_behind(hosted):
                left.append(hosted)
                continue
            hosted.listed = False
            if self._in_line(hosted):
                self._add(formed, hosted)
        if not patient and (not ways or len(left) < ways[0].least):
            room = max(limit - len(formed.hosted), 0)
            for hosted in left[:room]:
                hosted.listed = False
                self._add(formed, hosted)
            left = left[room:]
        ready.extendleft(reversed(left))
        return formed

    def _several(self, room: int, sessions: int, *, full: bool) -> Round:
        """Several entries each of sessions that are behind; empty where that is not worth it.

        Half of a launch is enough, unless the largest is to be `full`: that is the one that half of
        all `sessions` fit, so that another round can be under way.
        """
        ways, ready = self.engine.catch_up, self._ready
        half = (sessions + 1) // 2
        top = next((way for way in ways if way.rows >= half), ways[-1])
        least = min(top.rows, half) if full else ways[0].least
        if room < 1 or len(ready) < least:
            return Round()
        looked = [ready.popleft() for _ in range(min(_LOOK * top.rows, len(ready)))]
        weights = looked[0].weights
        behind = [h for h in looked if h.weights == weights and self._is_behind(h)]
        chosen, depth = list[Hosted](), 0
        if len(behind) >= least:
            line = len(looked) + len(ready)
            chosen, depth = self._choose(behind, line, top, min(half, room))
        taken = set(chosen)
        ready.extendleft(hosted for hosted in reversed(looked) if hosted not in taken)
        if not chosen:
            return Round()
        formed = Round(depth=depth, hosted=chosen)
        ids, raws = formed.ids, formed.raws
        for hosted in chosen:
            hosted.listed, hosted.in_flight = False, True
            take = hosted.queue.popleft
            for _ in range(depth):
                id_, fields = take()
                ids.append(id_)
                raws.append(fields[1])
            if hosted.more and len(hosted.queue) <= self._low_water:
                self._low(hosted)
        return formed

    def _choose(
        self, behind: list[Hosted], line: int, top: CatchUp, limit: int
    ) -> tuple[list[Hosted], int]:
        """Sessions, and how many entries of each, that are quicker run so than one each.

        None where a round of one entry each of the `line` takes less a frame.
        """
        lengths = sorted((len(hosted.queue) for hosted in behind), reverse=True)
        together = min(line, self.engine.round_rows)
        best, chosen = 1e3 * self.engine.cost_ms(together) / together + _FRAME_US, (0, 0)
        for way in self.engine.catch_up:
            if way.least > len(behind) or way.rows > top.rows:
                break
            count = min(way.rows, limit, len(behind))
            # As many as the first in line has, and as the last that the launch takes.
            depth = min(way.frames, len(behind[0].queue), lengths[count - 1])
            us = 1e3 * self.engine.cost_ms(way.rows) / count + _FRAME_US / depth
            if us <= best:
                best, chosen = us, (count, depth)
        count, depth = chosen
        return [hosted for hosted in behind if len(hosted.queue) >= depth][:count], depth

    def _in_line(self, hosted: Hosted) -> bool:
        return hosted.runnable and not hosted.gone

    def _is_behind(self, hosted: Hosted) -> bool:
        """Whether several of its entries can run in one launch."""
        return (
            len(hosted.queue) >= _BEHIND
            and hosted.even
            and self._in_line(hosted)
            and self.rows.has_state(hosted.session)
        )

    def _add(self, formed: Round, hosted: Hosted) -> None:
        """Take the session's oldest entry into a round."""
        id_, fields = hosted.queue.popleft()
        hosted.in_flight = True
        if not hosted.queue:
            hosted.even = True
        if hosted.more and len(hosted.queue) <= self._low_water:
            self._low(hosted)
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
            formed.raws.append(self.reader.frames.usual(entry.payload))
