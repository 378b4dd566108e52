"""The pool: every session's state as rows of arrays that stay on the device.

One array a state leaf, slot-major (`[slots + 1, ...]`); a session holds one slot, and the extra
last slot, the sink, is where padding reads and writes. Rows change in place (the arrays are
donated), and only here.

    pool.admit(["a", "b"])            # a slot each, or none and what is short
    plan = pool.plan(["a", "b"], rows=4)
    ...                               # a launch runs the rows that the plan names
    pool.commit([(plan, new_rows)])   # now the rows hold state
    pool.release(["a"])               # the row is zeroed before anyone else can have it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from slotstream_worker.engine.errors import PoolFull, StalePlan
from slotstream_worker.engine.state import StateSpec, Tree

Session = Hashable
Rows = list[jax.Array]
"""Slot-major rows, one array `[rows, ...]` a leaf."""

_SIZES = (1, 16, 128)
"""Rows a bookkeeping call (read, write, zero, copy) takes at once, padded with the sink."""


@dataclass(frozen=True)
class Plan:
    """Addressing of one launch: which slot each of its rows reads and writes.

    `slot_indices` is int32 `[rows]` (the sink beyond `num_rows`), `has_state` bool `[rows]`,
    `generations` int64 `[num_rows]`: those of the slots when the plan was made.
    """

    sessions: tuple[Session, ...]
    slot_indices: NDArray[np.int32]
    has_state: NDArray[np.bool_]
    generations: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """Rows that are sessions, before the padding."""
        return len(self.sessions)


@dataclass(frozen=True)
class Places:
    """Where the sessions of a round are: arrays `[sessions]` as in `Plan`, before any padding."""

    sessions: Sequence[Session]
    slots: NDArray[np.int32]
    has_state: NDArray[np.bool_]
    generations: NDArray[np.int64]
    sink: int

    def plan(
        self, part: slice | Sequence[int], rows: int, *, has_state: bool | None = None
    ) -> Plan:
        """Address a launch of `rows` rows over some of the sessions.

        Args:
            part: which of them.
            rows: at least as many.
            has_state: of all of them alike, whatever they hold.
        """
        slots, generations = self.slots[part], self.generations[part]
        count = len(slots)
        if count == rows:
            indices = slots
        else:
            indices = np.full(rows, self.sink, np.int32)
            indices[:count] = slots
        if has_state is None:
            states = np.zeros(rows, bool)
            states[:count] = self.has_state[part]
        else:
            states = np.full(rows, has_state)
        named = self.sessions[part] if isinstance(part, slice) else [self.sessions[k] for k in part]
        return Plan(tuple(named), indices, states, generations)


@dataclass(frozen=True)
class Admission:
    """Outcome of `admit`: the sessions that got a slot by it, or how many slots were short."""

    taken: tuple[Session, ...]
    short: int = 0

    def __bool__(self) -> bool:
        return not self.short


@dataclass(frozen=True)
class Reading:
    """Rows being read: for each part, which of its sessions have left rest, and their rows."""

    parts: tuple[tuple[list[bool], Rows], ...]

    @property
    def ready(self) -> bool:
        """Whether `Pool.fetch` would not have to wait."""
        return all(is_ready(rows) for _, rows in self.parts)


class Pool:
    """Rows of state for `slots` sessions. Constructed at rest: all zeros, all slots free.

    Args:
        spec: of the state.
        slots: rows.
        rest: the row that a session starts from, by its id, where that is not the same for all;
            a session then holds state from the start.
    """

    def __init__(
        self, spec: StateSpec, slots: int, rest: Callable[[Session], bytes] | None = None
    ) -> None:
        if slots < 1:
            raise ValueError(f"a pool has at least one slot, got {slots}")
        self.spec, self.slots, self.sink, self.rest = spec, slots, slots, rest
        self._arrays: Rows = spec.zeros(slots + 1)
        self._late: deque[tuple[NDArray[np.int32], Rows]] = deque()  # committed, not written yet
        self._held: dict[Session, int] = {}
        self._free = deque(range(slots))
        # By slot, the sink's last, so that a whole round is looked up at once. `_has_state` is
        # False until a frame has run (the row is at rest). `_generations` counts the changes
        # that no plan made (admit, release, fork, reset, write), so that an older plan is spotted.
        self._has_state = np.zeros(slots + 1, bool)
        self._generations = np.zeros(slots + 1, np.int64)

    # What is held

    @property
    def free(self) -> int:
        """Slots that no session holds."""
        return len(self._free)

    @property
    def slot_bytes(self) -> int:
        """Bytes of state a slot."""
        return self.spec.row_bytes

    @property
    def sessions(self) -> Mapping[Session, int]:
        """Slot of every session held."""
        return dict(self._held)

    @property
    def fresh(self) -> set[int]:
        """Slots whose session is at rest: no frame has run since it was admitted or reset."""
        return {slot for slot in self._held.values() if not self._has_state[slot]}

    @property
    def arrays(self) -> Rows:
        """All rows, an array `[slots + 1, ...]` a leaf, with all that is committed."""
        self.settle()
        return self._arrays

    @arrays.setter
    def arrays(self, arrays: Rows) -> None:
        self._arrays = arrays

    @property
    def state(self) -> Tree:
        """All rows, as the model's tree of slot-major arrays `[slots + 1, ...]`."""
        return jax.tree.unflatten(self.spec.treedef, self.arrays)

    def view(self, path: str) -> jax.Array:
        """One leaf's slot-major array `[slots + 1, ...]`, by its path in the tree."""
        for leaf, array in zip(self.spec.leaves, self.arrays, strict=True):
            if leaf.path == path:
                return array
        raise KeyError(
            f"no state leaf {path!r}; there are "
            f"{', '.join(leaf.path for leaf in self.spec.leaves) or 'none'}"
        )

    def __contains__(self, session: Session) -> bool:
        return session in self._held

    def __len__(self) -> int:
        return len(self._held)

    def has_state(self, session: Session) -> bool:
        """Whether the session has left rest."""
        return bool(self._has_state[self._held[session]])

    # Slots

    def admit(self, sessions: Iterable[Session], forks: Iterable[Session] = ()) -> Admission:
        """Reserve a slot for each session and each fork target: all of them, or none.

        A session that holds a slot already keeps it, so admitting twice is harmless.
        """
        new = [s for s in dict.fromkeys([*sessions, *forks]) if s not in self._held]
        if len(new) > len(self._free):
            return Admission((), len(new) - len(self._free))
        for session in new:
            slot = self._held[session] = self._free.popleft()
            self._has_state[slot] = False
            self._generations[slot] += 1
        if self.rest:
            self.write(dict.fromkeys(new, b""))
        return Admission(tuple(new))

    def rollback_admit(self, admission: Admission) -> None:
        """Give back what `admission` took; sessions that held a slot before it keep theirs."""
        self.release(s for s in admission.taken if s in self._held)

    def release(self, sessions: Iterable[Session]) -> None:
        """Free the sessions' slots and zero their rows; a session not held is passed over."""
        slots = [self._held.pop(session) for session in sessions if session in self._held]
        self._zero(slots)
        self._has_state[slots] = False
        self._generations[slots] += 1
        self._free.extend(slots)

    def reset(self, session: Session) -> None:
        """Back to rest, zeroed, the slot kept."""
        if self.rest:
            self.write({session: b""})
            return
        slot = self._held[session]
        self._zero([slot])
        self._has_state[slot] = False
        self._generations[slot] += 1

    def fork(self, source: Session, target: Session) -> None:
        """Copy `source`'s row onto `target`'s; a copy, since rows change in place.

        Raises:
            PoolFull: `target` holds no slot and none is free.
        """
        if not self.admit([source], [target]):
            raise PoolFull(f"all {self.slots} slots hold sessions; none is free for {target!r}")
        a, b = self._held[source], self._held[target]
        for size, part in _chunks([(a, b)]):
            pairs = np.full((2, size), self.sink, np.int32)
            pairs[:, : len(part)] = np.transpose(part)
            self.arrays = _copy(self.arrays, pairs[0], pairs[1])
        self._has_state[b] = self._has_state[a]
        self._generations[b] += 1

    # Rounds

    def plan(
        self, sessions: Sequence[Session], rows: int | None = None, *, ahead: Iterable[Plan] = ()
    ) -> Plan:
        """Address one launch of `rows` rows (by default as many as sessions).

        With `ahead`, plans in flight, the addressing is that of the round after them; it is
        staged by being kept, and dropped by being forgotten.
        """
        rows = len(sessions) if rows is None else rows
        if len(sessions) > rows:
            raise ValueError(
                f"a launch of {rows} rows takes at most so many sessions, each once; "
                f"got {len(sessions)}"
            )
        plan = self.places(sessions).plan(slice(0, len(sessions)), rows)
        if coming := {session for plan in ahead for session in plan.sessions}:
            known = np.fromiter((s in coming for s in sessions), bool, len(sessions))
            plan.has_state[: len(sessions)] |= known
        return plan

    def places(self, sessions: Sequence[Session]) -> Places:
        """Where the sessions of a round are, looked up once for all of its launches.

        Raises:
            ValueError: a session is named twice.
            KeyError: one holds no slot.
        """
        if len(set(sessions)) != len(sessions):
            raise ValueError("a round takes sessions, each once; one is named twice")
        slots = self._slots_of(sessions)
        return Places(sessions, slots, self._has_state[slots], self._generations[slots], self.sink)

    def check(self, plan: Plan) -> None:
        """Raise `StalePlan` where a row the plan names is not what it was planned on."""
        if (stale := self._stale(plan)).any():
            session = plan.sessions[int(stale.argmax())]
            raise StalePlan(
                f"session {session!r} was released, reset, forked onto or written "
                "after the plan was made; plan again"
            )

    def commit(self, results: Iterable[tuple[Plan, Rows]]) -> None:
        """Write each plan's new rows (`[rows, ...]` a leaf); the rows now hold state.

        A row whose session was released, reset, written or forked onto since goes to the sink. The
        device is told by `settle`, or when the rows are next looked at, so that whoever waits for
        the outputs does not wait for this too.
        """
        for plan, rows in results:
            slots, stale = plan.slot_indices[: plan.num_rows], self._stale(plan)
            target = plan.slot_indices
            if stale.any():
                target = target.copy()
                target[: plan.num_rows][stale] = self.sink
                slots = slots[~stale]
            self._has_state[slots] = True
            self._late.append((target, rows))

    def settle(self) -> None:
        """Have the device write the rows that are committed."""
        while self._late:
            target, rows = self._late[0]
            self._arrays = _scatter(self._arrays, target, rows)
            self._late.popleft()  # only now: what could not be written is still to be

    def _stale(self, plan: Plan) -> NDArray[np.bool_]:
        """Rows of a plan whose slot has been given up or changed since it was made."""
        now = self._generations[plan.slot_indices[: plan.num_rows]]
        stale: NDArray[np.bool_] = now != plan.generations
        return stale

    def _slots_of(self, sessions: Sequence[Session]) -> NDArray[np.int32]:
        return np.fromiter(map(self._held.__getitem__, sessions), np.int32, len(sessions))

    # Rows in and out

    def read(self, sessions: Sequence[Session]) -> list[bytes]:
        """The sessions' rows as bytes (`StateSpec.pack`); no bytes for a session at rest."""
        return self.fetch(self.start_read(sessions))

    def start_read(self, sessions: Sequence[Session]) -> Reading:
        """Begin a read; the rows are those of now, whatever is committed before `fetch`."""
        parts = []
        for size, part in _chunks(self._slots_of(sessions)):
            indices = np.full(size, self.sink, np.int32)
            indices[: len(part)] = part
            parts.append((self._has_state[part].tolist(), _gather(self.arrays, indices)))
        return Reading(tuple(parts))

    def fetch(self, reading: Reading) -> list[bytes]:
        """Finish a read that `start_read` began."""
        packed: list[bytes] = []
        for has_state, rows in reading.parts:
            count = len(has_state)
            raws = self.spec.pack([np.asarray(array)[:count] for array in rows], count)
            packed += [raw if real else b"" for raw, real in zip(raws, has_state, strict=True)]
        return packed

    def write(self, rows: Mapping[Any, bytes]) -> None:
        """Set rows from bytes; no bytes puts a session at rest. The sessions hold slots.

        Raises:
            ValueError: bytes that are not a row of this model's state; nothing is written.
        """
        if self.rest:
            rows = {session: raw or self.rest(session) for session, raw in rows.items()}
        full = {session: raw for session, raw in rows.items() if raw}
        values = self.spec.unpack(list(full.values()))
        start = 0
        for size, part in _chunks([self._held[s] for s in full]):
            indices = np.full(size, self.sink, np.int32)
            indices[: len(part)] = part
            padded = []
            for array in values:
                block = np.zeros((size, *array.shape[1:]), array.dtype)
                block[: len(part)] = array[start : start + len(part)]
                padded.append(block)
            self.arrays = _scatter(self.arrays, indices, padded)
            start += len(part)
        # A slot that has not left rest is zero already.
        self._zero([self._held[s] for s in rows if s not in full and self.has_state(s)])
        for session in rows:
            slot = self._held[session]
            self._has_state[slot] = session in full
            self._generations[slot] += 1

    def warm(self) -> None:
        """Compile the bookkeeping calls, on the sink alone."""
        for size in _SIZES:
            sink = np.full(size, self.sink, np.int32)
            rows = _gather(self.arrays, sink)
            self.arrays = _scatter(self.arrays, sink, [np.asarray(array) for array in rows])
            self.arrays = _copy(_zeroed(self.arrays, sink), sink, sink)

    def _zero(self, slots: Sequence[int]) -> None:
        for size, part in _chunks(slots):
            indices = np.full(size, self.sink, np.int32)
            indices[: len(part)] = part
            self.arrays = _zeroed(self.arrays, indices)


def _chunks(items: Any) -> Iterable[tuple[int, Any]]:
    """`items` in parts, each with the fixed size it is padded to."""
    start = 0
    while start < len(items):
        left = len(items) - start
        size = next((size for size in _SIZES if size >= left), _SIZES[-1])
        yield size, items[start : start + size]
        start += size


def is_ready(arrays: Iterable[Any]) -> bool:
    """Whether all of the arrays have been computed."""
    return all(array.is_ready() for array in arrays)


# Indices come from the pool's own slots, so they are in bounds; saying so saves a pass.


@jax.jit
def _gather(arrays: Rows, indices: jax.Array) -> Rows:
    return [gather_rows(array, indices) for array in arrays]


@partial(jax.jit, donate_argnums=0)
def _scatter(arrays: Rows, indices: jax.Array, rows: Rows) -> Rows:
    return [
        array.at[indices].set(new, mode="promise_in_bounds")
        for array, new in zip(arrays, rows, strict=True)
    ]


@partial(jax.jit, donate_argnums=0)
def _zeroed(arrays: Rows, indices: jax.Array) -> Rows:
    return [
        array.at[indices].set(jnp.zeros((), array.dtype), mode="promise_in_bounds")
        for array in arrays
    ]


@partial(jax.jit, donate_argnums=0)
def _copy(arrays: Rows, source: jax.Array, target: jax.Array) -> Rows:
    return [
        array.at[target].set(gather_rows(array, source), mode="promise_in_bounds")
        for array in arrays
    ]


def gather_rows(array: jax.Array, indices: jax.Array) -> jax.Array:
    """Rows `[n, ...]` of a slot-major array; `indices` int32 `[n]`, known to be in bounds."""
    return array.at[indices].get(mode="promise_in_bounds")
