"""Rows of more sessions than there are slots: the least recently used wait in host memory.

    rows = Rows(pool)
    rows.hold({"a": b"", "b": checkpoint})    # taken in, not on the device yet
    rows.seat(["a", "b"])                     # on the device, before a round that runs them

A row moves as its bytes, so it comes back bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slotstream_worker.engine.errors import PoolFull
from slotstream_worker.engine.pool import Pool, Reading, Session


@dataclass(frozen=True)
class RowsReading:
    """Rows being read: of the sessions in slots from the device, of the parked from here."""

    sessions: tuple[Session, ...]
    seated: tuple[Session, ...]
    parked: Mapping[Session, bytes]
    rows: Reading

    @property
    def ready(self) -> bool:
        """Whether `Rows.fetch` would not have to wait."""
        return self.rows.ready


class Rows:
    """The rows of all sessions held, in slots or parked."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._parked: dict[Session, bytes] = {}
        self._seated: dict[Session, None] = {}  # the least recently used first

    def __len__(self) -> int:
        return len(self._parked) + len(self._seated)

    def __contains__(self, session: Session) -> bool:
        return session in self._parked or session in self._seated

    @property
    def parked(self) -> int:
        """Sessions whose row is in host memory."""
        return len(self._parked)

    def has_state(self, session: Session) -> bool:
        """Whether a session has left rest."""
        if session in self._seated:
            return self.pool.has_state(session)
        return bool(self._parked[session] or self.pool.rest)

    def hold(self, rows: Mapping[str, bytes]) -> None:
        """Take sessions in with their rows (no bytes: at rest); they take a slot when they run.

        Raises:
            ValueError: bytes that are not a row of this model's state; nothing is taken in.
        """
        for session, raw in rows.items():
            if raw and len(raw) != self.pool.spec.row_bytes:
                raise ValueError(
                    f"session {session}: a row of this model's state takes "
                    f"{self.pool.spec.row_bytes} bytes, got {len(raw)}"
                )
        self.drop(rows)
        self._parked.update(rows)

    def drop(self, sessions: Iterable[Session]) -> None:
        """Forget sessions; a slot that becomes free is zeroed. One not held is passed over."""
        seated = []
        for session in sessions:
            self._parked.pop(session, None)
            if session in self._seated:
                del self._seated[session]
                seated.append(session)
        if seated:
            self.pool.release(seated)

    def seat(
        self, sessions: Sequence[Session], busy: Callable[[Session], bool] = lambda _session: False
    ) -> None:
        """Put the sessions' rows into slots; the least recently used of the others make room.

        Args:
            sessions: those of a round.
            busy: which others must keep their slot, being in a round that is under way.

        Raises:
            PoolFull: more sessions than slots.
        """
        if not self._parked:
            return  # all are seated, and nobody will have to go for them
        if len(sessions) > self.pool.slots:
            raise PoolFull(f"{len(sessions)} rows are to be seated in {self.pool.slots} slots")
        for session in sessions:
            if session in self._seated:  # used now: the last to go
                del self._seated[session]
                self._seated[session] = None
        coming = [session for session in sessions if session not in self._seated]
        self._park(len(coming) - self.pool.free, set(sessions), busy)
        if not coming:
            return
        if not self.pool.admit(coming):
            raise PoolFull(
                f"{len(coming)} rows are to be seated, {self.pool.free} slots are free, and the "
                "others hold rows of rounds that are under way"
            )
        self.pool.write({session: self._parked[session] for session in coming})
        for session in coming:
            del self._parked[session]
        self._seated.update(dict.fromkeys(coming))

    def _park(self, count: int, staying: set[Session], busy: Callable[[Session], bool]) -> None:
        if count <= 0:
            return
        going: list[Session] = []
        for session in self._seated:
            if session not in staying and not busy(session):
                going.append(session)
                if len(going) == count:
                    break
        self._parked.update(zip(going, self.pool.read(going), strict=True))
        for session in going:
            del self._seated[session]
        self.pool.release(going)

    def reset(self, session: Session) -> None:
        """Put a session back at rest."""
        if session in self._seated:
            self.pool.reset(session)
        else:
            self._parked[session] = b""

    def read(self, sessions: Sequence[Session]) -> list[bytes]:
        """The sessions' rows as bytes; no bytes for one at rest."""
        return self.fetch(self.start_read(sessions))

    def start_read(self, sessions: Sequence[Session]) -> RowsReading:
        """Begin a read; the rows are those of now, whatever is changed before `fetch`."""
        seated = [session for session in sessions if session in self._seated]
        parked = {s: self._parked[s] for s in sessions if s not in self._seated}
        return RowsReading(tuple(sessions), tuple(seated), parked, self.pool.start_read(seated))

    def fetch(self, reading: RowsReading) -> list[bytes]:
        """Finish a read that `start_read` began."""
        rows = dict(zip(reading.seated, self.pool.fetch(reading.rows), strict=True))
        rows.update(reading.parked)
        return [rows[session] for session in reading.sessions]
