"""One model, its pool and its launches: a round in, outputs out. No Redis in here.

engine = Engine(model, slots=1024)
engine.prepare()                               # measure, choose the row counts, compile
engine.pool.admit(sessions)
flight = engine.begin(sessions, frames)        # returns while the device computes
for ran in engine.finish(flight):              # waits, and only then changes the rows
    ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slotstream_worker.engine.cover import Cover
from slotstream_worker.engine.launch import Launched, Launcher
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.engine.pool import Pool, Session
from slotstream_worker.engine.probe import Probe, candidates, probe


@dataclass(frozen=True)
class Ran:
    """A launch that ran: its sessions, and their outputs `[sessions, frame, ...]` by name."""

    sessions: tuple[Session, ...]
    outputs: dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Failed:
    """A session whose frame raised when it ran alone; its row is as it was."""

    session: Session
    error: Exception


@dataclass(frozen=True)
class Flight:
    """A round under way: one or more launches, none of which has changed the pool yet."""

    launches: tuple[Launched, ...]


class Engine:
    """Runs rounds of one model over a pool of `slots` rows. `prepare` before the first round."""

    def __init__(self, model: StreamModel, slots: int) -> None:
        self.model = model
        self.pool = Pool(model.spec, slots)
        self.launcher = Launcher(model)
        self.probed: Probe | None = None
        self._cover: Cover | None = None

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
        return self.probed

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
    ) -> Flight:
        """Launch one frame of each session; every row stays as it is until `finish`.

        Args:
            sessions: hold slots, each named once.
            frames: `[sessions, frame, *sample_shape]`, in their order.
            from_rest: sessions whose state this frame starts anew (a reset before it).
        """
        if self._cover is None:
            raise RuntimeError("the engine has not been prepared; call prepare() first")
        has_state = self.pool.all_have_state(sessions)
        if from_rest:
            has_state &= np.array([session not in from_rest for session in sessions], bool)
        launches = []
        if has_state.all() or not has_state.any():
            self._launch(launches, list(sessions), frames, bool(has_state.all()))
        else:
            for state in (False, True):
                part = np.flatnonzero(has_state == state)
                self._launch(launches, [sessions[k] for k in part], frames[part], state)
        return Flight(tuple(launches))

    def _launch(
        self,
        launches: list[Launched],
        sessions: list[Session],
        frames: np.ndarray[Any, Any],
        has_state: bool,
    ) -> None:
        """Launch rows that are all at rest, or all hold state."""
        start = 0
        for count in self._cover.split(len(sessions)) if self._cover else ():
            part = sessions[start : start + count]
            plan = self.pool.plan(part, rows=count)
            plan.has_state[:] = has_state
            block = _block(frames[start : start + count], count)
            launches.append(self.launcher.launch(self.pool, plan, block))
            start += count

    def finish(self, flight: Flight) -> list[Ran]:
        """Wait for the round, then commit all of its rows; the outputs, launch by launch.

        Raises what a launch raised; then no row has changed, whichever launch it was.
        """
        ran = [Ran(launched.plan.sessions, launched.wait()) for launched in flight.launches]
        self.pool.commit((launched.plan, launched.rows) for launched in flight.launches)
        return ran

    def run(
        self,
        sessions: Sequence[Session],
        frames: np.ndarray[Any, Any],
        *,
        from_rest: Collection[Session] = (),
    ) -> list[Ran]:
        """`begin` and `finish` in one."""
        return self.finish(self.begin(sessions, frames, from_rest=from_rest))

    def isolate(
        self,
        sessions: Sequence[Session],
        frames: np.ndarray[Any, Any],
        *,
        from_rest: Collection[Session] = (),
    ) -> Iterable[Ran | Failed]:
        """Run a round that failed once more, halved until each failure stands alone.

        Yields the launches that succeeded, and each session whose own frame raises twice.
        """
        try:
            yield from self.run(sessions, frames, from_rest=from_rest)
        except Exception as error:
            if len(sessions) == 1:
                yield Failed(sessions[0], error)
                return
            half = len(sessions) // 2
            for part in (slice(0, half), slice(half, None)):
                yield from self.isolate(sessions[part], frames[part], from_rest=from_rest)


def _block(frames: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """Frames of the launch's rows, padded with zeros to its row count."""
    if len(frames) == count:
        return frames
    block = np.zeros((count, *frames.shape[1:]), frames.dtype)
    block[: len(frames)] = frames
    return block
