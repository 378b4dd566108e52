"""One model, its pool and its launches: a round in, outputs out. No Redis in here.

engine = Engine(model, slots=1024)
engine.prepare()                               # measure, choose the row counts, compile
engine.pool.admit(sessions)
flight = engine.begin(sessions, frames)        # returns while the device computes
for ran in engine.finish(flight):              # waits, and only then changes the rows
    ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slotstream_worker.engine import catchup
from slotstream_worker.engine.catchup import CatchUp
from slotstream_worker.engine.cover import Cover
from slotstream_worker.engine.launch import Launched, Launcher
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.engine.pool import Places, Pool, Session
from slotstream_worker.engine.probe import Probe, candidates, probe

Weights = str | Sequence[str]
"""The version that all sessions of a round run with, or that of each."""

_WORTH = 1.2
"""How much dearer a row may be in a smaller launch that is preferred all the same."""


@dataclass(frozen=True)
class Ran:
    """A launch that ran: its sessions, and their outputs `[sessions, frame, ...]` by name.

    `positions`: where each of them stood in what `begin` was given.
    """

    sessions: tuple[Session, ...]
    outputs: dict[str, np.ndarray[Any, Any]]
    positions: Sequence[int]


@dataclass(frozen=True)
class Failed:
    """A session whose frame raised when it ran alone; its row is as it was."""

    session: Session
    error: Exception
    position: int


@dataclass(frozen=True)
class Flight:
    """A round under way: one or more launches, none of which has changed the pool yet."""

    launches: tuple[Launched, ...]
    positions: tuple[Sequence[int], ...]
    undo: Mapping[Session, bytes] = field(default_factory=dict)
    """Rows as they were before a reset that is part of the round, where that had to be written."""
    expected_ms: float = 0.0
    """How long it takes, by what was measured at the start."""

    @property
    def ready(self) -> bool:
        """Whether `Engine.finish` would not have to wait."""
        return all(launched.ready for launched in self.launches)


class Engine:
    """Runs rounds of one model over a pool of `slots` rows. `prepare` before the first round."""

    def __init__(self, model: StreamModel, slots: int) -> None:
        self.model = model
        self.pool = Pool(model.spec, slots, model.rest)
        self.launcher = Launcher(model)
        self.versions: dict[str, Any] = {"": model.variables}
        """Variables that a launch can run with, by name; "" are those the model was made with."""
        self.restarting: set[Session] = set()
        """Sessions whose row is at rest already, for a round under way that starts them anew."""
        self.probed: Probe | None = None
        self._cover: Cover | None = None
        self.catch_up: list[CatchUp] = []
        """Launches of several frames of a session, the smallest first; none: they round otherwise.
        """

    def prepare(
        self,
        row_counts: Sequence[int] | None = None,
        *,
        progress: Callable[[int], None] = lambda _count: None,
    ) -> Probe:
        """Choose the row counts and compile them, before any traffic.

        Args:
            row_counts: measure these only; by default a ladder up to the number of slots.
            progress: called with each row count before it is compiled.

        Raises:
            CannotStream: a session's outputs depend on its company.
        """
        counts = list(row_counts or candidates(self.pool.slots))
        self.probed = probe(self.launcher, self.pool, counts, progress=progress)
        # After the probe: rows that launches made may be bound to a device, which is compiled anew.
        self.pool.warm()
        self._cover = self.probed.cover
        self.catch_up = catchup.ways(self.launcher, self.pool, self._cover.cost_ms)
        return self.probed

    @property
    def round_rows(self) -> int:
        """Rows of a round that is worth having: more of them would run hardly faster a row.

        Rounds of fewer rows than there are let one be formed and another be published while a
        third runs.
        """
        if self._cover is None:
            return self.pool.slots
        each = {count: ms / count for count, ms in self._cover.cost_ms.items()}
        return min(count for count, ms in each.items() if ms <= _WORTH * min(each.values()))

    @property
    def row_counts(self) -> tuple[int, ...]:
        """The row counts in use; none before `prepare`."""
        return self.probed.row_counts if self.probed else ()

    def begin(
        self,
        sessions: Sequence[Session],
        frames: np.ndarray[Any, Any],
        *,
        from_rest: Collection[Session] = (),
        steps: Sequence[int] | None = None,
        weights: Weights = "",
    ) -> Flight:
        """Launch one frame of each session; every row stays as it is until `finish`.

        Args:
            sessions: hold slots, each named once.
            frames: `[sessions, frame, *sample_shape]`, in their order.
            from_rest: sessions whose state this frame starts anew (a reset before it).
            steps: how many of each frame's steps are real; all of them by default.
            weights: the version they run with, or that of each; the model's own where it is "".
                Sessions of different versions go in launches of their own.
        """
        if self._cover is None:
            raise RuntimeError("the engine has not been prepared; call prepare() first")
        undo: dict[Session, bytes] = {}
        if from_rest and self.pool.rest:
            undo = dict(zip(from_rest, self.pool.read(list(from_rest)), strict=True))
            self.pool.write(dict.fromkeys(from_rest, b""))
            self.restarting.update(undo)
            from_rest = ()
        try:
            flight = self._begin(sessions, frames, from_rest, steps, weights)
            return replace(flight, undo=undo) if undo else flight
        except BaseException:
            self._undo(undo)
            raise

    def _undo(self, rows: Mapping[Session, bytes]) -> None:
        self.restarting.difference_update(rows)
        if rows:
            self.pool.write({s: raw for s, raw in rows.items() if s in self.pool})

    def _begin(
        self,
        sessions: Sequence[Session],
        frames: np.ndarray[Any, Any],
        from_rest: Collection[Session],
        steps: Sequence[int] | None,
        weights: Weights,
    ) -> Flight:
        places = self.pool.places(sessions)
        has_state = places.has_state
        if from_rest:
            has_state &= np.array([session not in from_rest for session in sessions], bool)
        parts: list[tuple[Launched, Sequence[int]]] = []
        sole = weights if isinstance(weights, str) else None
        ran = int(np.count_nonzero(has_state))
        if sole is not None and ran in (0, len(sessions)):
            where, variables = range(len(sessions)), self.versions[sole]
            self._launch(parts, places, frames, where, ran > 0, variables, steps)
        else:
            groups: dict[tuple[str, bool], list[int]] = {}
            for k, state in enumerate(has_state.tolist()):
                groups.setdefault((weights[k] if sole is None else sole, state), []).append(k)
            for (version, state), chosen in sorted(groups.items()):
                variables = self.versions[version]
                real = [steps[k] for k in chosen] if steps is not None else None
                self._launch(parts, places, frames[chosen], chosen, state, variables, real)
        return Flight(
            tuple(part for part, _ in parts),
            tuple(where for _, where in parts),
            expected_ms=sum(self.cost_ms(len(part.plan.slot_indices)) for part, _ in parts),
        )

    def cost_ms(self, rows: int) -> float:
        """Milliseconds that a round of so many rows takes, by what was measured at the start."""
        return self._cover.cost(rows) if self._cover else 0.0

    def begin_far(
        self, sessions: Sequence[Session], frames: np.ndarray[Any, Any], weights: str = ""
    ) -> Flight:
        """Launch several frames of each session at once, with the bits of one after another.

        Args:
            sessions: as many as one of `catch_up` has rows, each named once; they hold slots and
                have left rest.
            frames: `[sessions, n, frame, *sample_shape]`, `n` being its `frames` at most.
            weights: the version all of them run with; the model's own where it is "".

        Returns:
            A flight whose outputs are `[sessions, n, frame, ...]`.
        """
        way = next((way for way in self.catch_up if way.rows >= len(sessions)), None)
        count = frames.shape[1]
        if way is None or count > way.frames:
            raise ValueError(
                f"no launch takes {count} frames of {len(sessions)} sessions; there are "
                f"{', '.join(f'{w.frames} of {w.rows}' for w in self.catch_up) or 'none'}"
            )
        rows = way.rows
        plan = self.pool.plan(sessions, rows=rows)
        block = frames
        if frames.shape[:2] != (rows, way.frames):
            block = np.zeros((rows, way.frames, *frames.shape[2:]), frames.dtype)
            block[: len(frames), :count] = frames
        variables = self.versions[weights]
        launched = self.launcher.launch_far(self.pool, plan, block, count, variables)
        where = (range(len(sessions)),)
        return Flight((launched,), where, expected_ms=count * self.cost_ms(rows))

    def _launch(
        self,
        parts: list[tuple[Launched, Sequence[int]]],
        places: Places,
        frames: np.ndarray[Any, Any],
        positions: Sequence[int],
        has_state: bool,
        variables: Any,
        steps: Sequence[int] | None,
    ) -> None:
        """Launch rows that are all at rest, or all hold state, and run with the same version.

        `positions` says which sessions of `places` they are; `frames` and `steps` are theirs.
        """
        start = 0
        for count in self._cover.split(len(positions)) if self._cover else ():
            part = slice(start, start + count)
            where = positions[part]
            seats = part if isinstance(positions, range) else where
            plan = places.plan(seats, count, has_state=has_state)
            block = _block(frames[part], count)
            real = steps[part] if steps is not None else None
            launched = self.launcher.launch(self.pool, plan, block, real, variables)
            parts.append((launched, where))
            start += count

    def finish(self, flight: Flight) -> list[Ran]:
        """Wait for the round, then commit all of its rows; the outputs, launch by launch.

        Raises what a launch raised; then no row has changed, whichever launch it was.
        """
        ran = list(self.outputs(flight))
        self.commit(flight)
        return ran

    def outputs(self, flight: Flight) -> Iterator[Ran]:
        """The outputs of a round, launch by launch, as they come; `commit` is still to follow.

        Raises what a launch raised; then no row has changed.
        """
        try:
            for launched, positions in zip(flight.launches, flight.positions, strict=True):
                yield Ran(launched.plan.sessions, launched.wait(), positions)
        except BaseException:
            self._undo(flight.undo)
            raise

    def commit(self, *flights: Flight) -> None:
        """Commit all rows of rounds of different sessions, the outputs of which have come."""
        for flight in flights:
            self.pool.commit((launched.plan, launched.rows) for launched in flight.launches)
            self.restarting.difference_update(flight.undo)

    def run(
        self,
        sessions: Sequence[Session],
        frames: np.ndarray[Any, Any],
        *,
        from_rest: Collection[Session] = (),
        steps: Sequence[int] | None = None,
        weights: Weights = "",
    ) -> list[Ran]:
        """`begin` and `finish` in one."""
        return self.finish(
            self.begin(sessions, frames, from_rest=from_rest, steps=steps, weights=weights)
        )

    def isolate(
        self,
        sessions: Sequence[Session],
        frames: np.ndarray[Any, Any],
        *,
        from_rest: Collection[Session] = (),
        positions: Sequence[int] | None = None,
        steps: Sequence[int] | None = None,
        weights: Weights = "",
    ) -> Iterable[Ran | Failed]:
        """Run a round that failed once more, halved until each failure stands alone.

        Yields the launches that succeeded, and each session whose own frame raises twice;
        `positions` are what they are called by in there (by default, places in `sessions`).
        """
        places = range(len(sessions)) if positions is None else positions
        if not len(sessions):
            return
        anew = set(from_rest).intersection(sessions)
        try:
            again = self.run(sessions, frames, from_rest=anew, steps=steps, weights=weights)
            for ran in again:
                yield replace(ran, positions=[places[k] for k in ran.positions])
        except Exception as error:
            if len(sessions) == 1:
                yield Failed(sessions[0], error, places[0])
                return
            half = len(sessions) // 2
            for part in (slice(0, half), slice(half, None)):
                yield from self.isolate(
                    sessions[part],
                    frames[part],
                    from_rest=anew,
                    positions=places[part],
                    steps=steps[part] if steps is not None else None,
                    weights=weights if isinstance(weights, str) else weights[part],
                )


def _block(frames: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """Frames of the launch's rows, padded with zeros to its row count."""
    if len(frames) == count:
        return frames
    block = np.zeros((count, *frames.shape[1:]), frames.dtype)
    block[: len(frames)] = frames
    return block
