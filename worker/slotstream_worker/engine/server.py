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
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from slotstream_worker.engine.engine import Engine
from slotstream_worker.engine.futures import FrameFuture, Futures
from slotstream_worker.engine.inputs import pack
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.engine.models.linen import linen
from slotstream_worker.engine.state import Tree

Waiting = tuple[np.ndarray[Any, Any], FrameFuture]


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
        self._check(session)
        future = self._futures.new()
        if type(frame) is np.ndarray and frame.dtype is self._dtype and frame.shape == self._shape:
            self.pending[session].append((frame.copy(), future))  # the usual frame
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
        # A copy: the caller may use its buffer for the next frame before this one runs.
        self.pending[session].append((np.array(array, self.model.dtype, order="C"), future))
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
        frames: list[np.ndarray[Any, Any]] = []
        futures: list[FrameFuture] = []
        for session in list(self._waiting):
            if claimed := self._claim(session):
                sessions.append(session)
                frames.append(claimed[0])
                futures.append(claimed[1])
        if not sessions:
            return 0
        try:
            ran = self.engine.run(sessions, self._stack(frames))
        except BaseException as error:
            for future in futures:
                future.set_exception(error)
            raise
        for launch in ran:
            # Copies, so that a result kept does not keep its whole round alive.
            rows: Iterable[Any]
            if self.model.single:
                rows = [row.copy() for row in launch.outputs["output"]]
            else:
                names = list(launch.outputs)
                parts = zip(*launch.outputs.values(), strict=True)
                rows = [
                    dict(zip(names, [array.copy() for array in row], strict=True)) for row in parts
                ]
            self._futures.resolve([futures[k] for k in launch.positions], rows)
        return len(sessions)

    def run(self) -> None:
        """Step until no frame waits."""
        while self.step():
            pass

    def _stack(self, frames: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """Frames `[frames, frame, *sample_shape]`; joined as bytes, which takes half the time."""
        if self.model.dtype.kind == "V":  # a dtype of an extension has no bytes to join
            return np.stack(frames)
        joined = b"".join(frames)  # type: ignore[arg-type]  # an array is a buffer
        return np.frombuffer(joined, self.model.dtype).reshape(len(frames), *self.model.frame_shape)

    def _claim(self, session: int) -> Waiting | None:
        """The session's oldest frame whose future is not cancelled, now running."""
        queue, claimed = self.pending[session], None
        while queue and claimed is None:
            frame, future = queue.popleft()
            if self._futures.claim(future):
                claimed = frame, future
        if not queue:
            del self._waiting[session]
        return claimed

    def _check(self, session: int) -> None:
        if session not in self.pending:
            raise KeyError(f"no open session {session!r}; open() starts one")
