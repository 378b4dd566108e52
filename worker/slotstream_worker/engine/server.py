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
from slotstream_worker.engine.futures import FrameFuture, Futures
from slotstream_worker.engine.inputs import pack
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.engine.models.linen import linen
from slotstream_worker.engine.state import Tree

Waiting = tuple[bytes, FrameFuture]
"""A frame's bytes, and the future of its outputs."""


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
        self._at_a_time = self.engine.round_rows
        self._queues: dict[int, collections.deque[Waiting]] = {}
        self._waiting: dict[int, None] = {}  # sessions with frames: a step looks at no others
        self._next = 0
        self._futures = Futures()
        self._dtype, self._shape = np.dtype(self.model.dtype), self.model.frame_shape

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

    @property
    def pending(self) -> dict[int, list[tuple[np.ndarray[Any, Any], Future[Any]]]]:
        """Frames of every open session that wait, the oldest first, each with its future."""
        return {
            session: [
                (np.frombuffer(raw, self._dtype).reshape(self._shape), future)
                for raw, future in queue
            ]
            for session, queue in self._queues.items()
        }

    def open(self) -> int:
        """Start a session at rest in a free slot; returns its id.

        Raises:
            RuntimeError: every slot holds a session.
        """
        if not self.engine.pool.admit([self._next]):
            raise RuntimeError(f"all {self.slots} slots hold sessions; close one first")
        session, self._next = self._next, self._next + 1
        self._queues[session] = collections.deque()
        return session

    def close(self, session: int) -> None:
        """End a session; its slot, zeroed, takes the next one. Waiting frames are cancelled."""
        if session not in self._queues:
            raise _unknown(session)
        for _, future in self._queues.pop(session):
            future.cancel()
        self._waiting.pop(session, None)
        self.engine.pool.release([session])

    def submit(self, session: int, frame: Any) -> Future[Any]:
        """Queue one frame of the session's stream.

        Args:
            session: an open session.
            frame: `[frame, *sample_shape]`; other numbers of the same kind are converted. Of a
                model with several inputs, a mapping of their names to such arrays.

        Returns:
            A future of the frame's outputs: `[frame, ...]`, or a mapping of names to such.

        Raises:
            KeyError: no such session.
            ValueError: a frame of another shape or kind.
        """
        queue = self._queues.get(session)
        if queue is None:
            raise _unknown(session)
        future = self._futures.new()
        if type(frame) is np.ndarray and frame.dtype is self._dtype and frame.shape == self._shape:
            # A copy: the caller may use its buffer for the next frame before this one runs.
            queue.append((frame.tobytes(), future))
            self._waiting[session] = None
            return future
        if self.model.inputs and isinstance(frame, Mapping):
            frame = self._packed(frame)
        array = np.asarray(frame)
        if array.shape != self.model.frame_shape:
            raise ValueError(f"a frame is {self.model.frame_shape}, got {array.shape}")
        own = array.dtype == self.model.dtype  # asked first: it takes no time
        if not own and not np.can_cast(array.dtype, self.model.dtype, "same_kind"):
            raise ValueError(
                f"a frame is {self.model.dtype}, and {array.dtype} does not convert "
                "to it without loss of kind"
            )
        queue.append((array.astype(self._dtype).tobytes(), future))
        self._waiting[session] = None
        return future

    def _packed(self, arrays: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        """A frame of several inputs as the model's bytes `[frame, step]`."""
        inputs, frame = self.model.inputs, self.model.frame
        if set(arrays) != {one.name for one in inputs}:
            raise ValueError(
                f"a frame has {', '.join(one.name for one in inputs)}; got {', '.join(arrays)}"
            )
        for one in inputs:
            shape, dtype = np.shape(arrays[one.name]), np.asarray(arrays[one.name]).dtype
            if shape != (frame, *one.shape) or not np.can_cast(dtype, one.dtype, "same_kind"):
                expected = f"{one.dtype}{[frame, *one.shape]}"
                raise ValueError(f"input {one.name} is {expected}, got {dtype}{list(shape)}")
        return pack(inputs, arrays)

    def step(self) -> int:
        """Run the oldest waiting frame of every session that has one; returns how many ran."""
        sessions: list[int] = []
        frames: list[bytes] = []
        futures: list[FrameFuture] = []
        with self._futures.lock:
            for session in list(self._waiting):
                if claimed := self._claim(session):
                    sessions.append(session)
                    frames.append(claimed[0])
                    futures.append(claimed[1])
        # One part runs while the next is joined, and while the outputs of those before are copied.
        parts = [
            slice(start, start + self._at_a_time)
            for start in range(0, len(sessions), self._at_a_time)
        ]
        results: list[tuple[list[FrameFuture], list[Any]]] = []
        try:
            flights = [
                self.engine.begin(sessions[part], self._stack(frames[part])) for part in parts
            ]
            for flight, part in zip(flights, parts, strict=True):
                those = futures[part]
                results += [
                    ([those[k] for k in ran.positions], self._rows(ran.outputs))
                    for ran in self.engine.outputs(flight)
                ]
            self.engine.commit(*flights)
        except BaseException as error:
            for future in futures:
                future.set_exception(error)
            raise
        for some, rows in results:
            self._futures.resolve(some, rows)
        self.engine.pool.settle()
        return len(sessions)

    def _rows(self, outputs: Mapping[str, np.ndarray[Any, Any]]) -> list[Any]:
        """Each row's outputs; copies, so that a result kept does not keep its whole round alive."""
        if self.model.single:
            return [row.copy() for row in outputs["output"]]
        names = list(outputs)
        return [
            dict(zip(names, [array.copy() for array in row], strict=True))
            for row in zip(*outputs.values(), strict=True)
        ]

    def run(self) -> None:
        """Step until no frame waits."""
        while self.step():
            pass

    def _stack(self, frames: list[bytes]) -> np.ndarray[Any, Any]:
        """Frames `[frames, frame, *sample_shape]`."""
        joined = np.frombuffer(b"".join(frames), self._dtype)
        return joined.reshape(len(frames), *self._shape)

    def _claim(self, session: int) -> Waiting | None:
        """The session's oldest frame whose future is not cancelled; it runs. The lock is held."""
        queue, claimed = self._queues[session], None
        while queue and claimed is None:
            frame, future = queue.popleft()
            if self._futures.claim(future):
                claimed = frame, future
        if not queue:
            del self._waiting[session]
        return claimed


def _unknown(session: Any) -> KeyError:
    return KeyError(f"no open session {session!r}; open() starts one")
