"""Serving in one process: many sessions of a streaming model, each with its own state.

    server = StreamServer(model, variables, slots=8, frame=10, sample_shape=(40,))
    session = server.open()
    future = server.submit(session, frame)     # [10, 40]: one frame of this session's stream
    server.run()                               # one batched step a round of waiting frames
    outputs = future.result()                  # [10, ...]

A session's outputs over its frames are the outputs of one call over its whole stream; one
without a frame keeps its row exactly. Cost follows the rows that run, not the slots that exist.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from slotstream_worker.engine.engine import Engine
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.engine.models.linen import linen
from slotstream_worker.engine.state import Tree

Waiting = tuple[np.ndarray[Any, Any], "Future[Any]"]


class StreamServer:
    """Sessions of a streaming model, `slots` at a time, advanced a frame a round.

    Takes a Flax linen module with its variables, or a `StreamModel` alone. Construction checks
    that the model can stream, chooses the row counts and compiles them.

    A future cancelled before its frame runs drops that frame, and the session runs its next
    one. A step that raises sets the exception on the futures of every frame it took, leaves
    every session's state as it was, and raises it. Calls come from one thread; futures may be
    waited for and cancelled from any.

    Readable: `state` (all rows, slot-major), `sessions` (session to slot), `fresh` (slots whose
    session has not run yet), `pending` (session to its waiting frames), `slots`, `frame`.

    Args:
        model: a linen module (`variables`, `frame` and `sample_shape` are then needed), or a
            `StreamModel`.
        variables: the module's variables.
        slots: sessions at a time.
        frame: time steps a frame.
        sample_shape: shape of one time step.
        dtype: dtype of the frames; float32 by default.
        call: further keyword arguments of the module's call.
        row_counts: launch with these row counts instead of those a measurement chooses.

    Raises:
        CannotStream: (a `ValueError`) the model cannot be served, with the reason.
    """

    def __init__(
        self,
        model: Any,
        variables: Mapping[str, Any] | None = None,
        *,
        slots: int,
        frame: int | None = None,
        sample_shape: tuple[int, ...] | None = None,
        dtype: Any = None,
        call: Mapping[str, Any] | None = None,
        row_counts: tuple[int, ...] | None = None,
    ) -> None:
        if isinstance(model, StreamModel):
            given = [
                name
                for name, value in (
                    ("variables", variables),
                    ("frame", frame),
                    ("sample_shape", sample_shape),
                    ("dtype", dtype),
                    ("call", call),
                )
                if value is not None
            ]
            if given:
                raise TypeError(f"a StreamModel brings its own {', '.join(given)}")
            self.model = model
        else:
            if variables is None or frame is None or sample_shape is None:
                raise TypeError("a linen module is served with variables, frame and sample_shape")
            self.model = linen(
                model,
                variables,
                frame=frame,
                sample_shape=sample_shape,
                dtype="float32" if dtype is None else dtype,
                call=call,
            )
        self.slots, self.frame = slots, self.model.frame
        self.engine = Engine(self.model, slots)
        self.engine.prepare(row_counts)
        self.pending: dict[int, collections.deque[Waiting]] = {}
        self._next = 0

    @property
    def state(self) -> Tree:
        """All sessions' state, as the model's tree of slot-major arrays `[slots + 1, ...]`."""
        return self.engine.pool.state

    @property
    def sessions(self) -> dict[int, int]:
        """Slot of every open session."""
        return {s: slot for s, slot in self.engine.pool.sessions.items() if isinstance(s, int)}

    @property
    def fresh(self) -> set[int]:
        """Slots whose session has not run a frame yet."""
        return self.engine.pool.fresh

    def open(self) -> int:
        """Start a session at rest in a free slot; returns its id.

        Raises:
            RuntimeError: every slot holds a session.
        """
        if not self.engine.pool.admit([self._next]):
            raise RuntimeError(f"all {self.slots} slots hold sessions; close one first")
        session, self._next = self._next, self._next + 1
        self.pending[session] = collections.deque()
        return session

    def close(self, session: int) -> None:
        """End a session; its slot, zeroed, takes the next one. Waiting frames are cancelled."""
        self._check(session)
        for _, future in self.pending.pop(session):
            future.cancel()
        self.engine.pool.release([session])

    def submit(self, session: int, frame: Any) -> Future[Any]:
        """Queue one frame of the session's stream.

        Args:
            session: an open session.
            frame: `[frame, *sample_shape]`; other numbers of the same kind are converted.

        Returns:
            A future of the frame's outputs: `[frame, ...]`, or a mapping of names to such.

        Raises:
            KeyError: no such session.
            ValueError: a frame of another shape or kind.
        """
        self._check(session)
        array = np.asarray(frame)
        if array.shape != self.model.frame_shape:
            raise ValueError(f"a frame is {self.model.frame_shape}, got {array.shape}")
        if not np.can_cast(array.dtype, self.model.dtype, "same_kind"):
            raise ValueError(
                f"a frame is {self.model.dtype}, and {array.dtype} does not convert "
                "to it without loss of kind"
            )
        future: Future[Any] = Future()
        # A copy: the caller may use its buffer for the next frame before this one runs.
        self.pending[session].append((np.array(array, self.model.dtype), future))
        return future

    def step(self) -> int:
        """Run the oldest waiting frame of every session that has one; returns how many ran."""
        taken = {
            session: frame
            for session in self.pending
            if (frame := self._claim(session)) is not None
        }
        if not taken:
            return 0
        try:
            ran = self.engine.run(list(taken), np.stack([frame for frame, _ in taken.values()]))
        except BaseException as error:
            for _, future in taken.values():
                future.set_exception(error)
            raise
        for launch in ran:
            for k, session in enumerate(launch.sessions):
                future = taken[session][1]  # type: ignore[index]
                # Copies, so that a result kept does not keep its whole round alive.
                row = {name: array[k].copy() for name, array in launch.outputs.items()}
                future.set_result(row["output"] if self.model.single else row)
        return len(taken)

    def run(self) -> None:
        """Step until no frame waits."""
        while self.step():
            pass

    def _claim(self, session: int) -> Waiting | None:
        """The session's oldest frame whose future is not cancelled, now running."""
        queue = self.pending[session]
        while queue:
            frame, future = queue.popleft()
            if future.set_running_or_notify_cancel():
                return frame, future
        return None

    def _check(self, session: int) -> None:
        if session not in self.pending:
            raise KeyError(f"no open session {session!r}; open() starts one")
