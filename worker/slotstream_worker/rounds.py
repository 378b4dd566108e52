"""A round: what is run together, as formed, and as under way on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

from slotstream_worker.engine.engine import Flight
from slotstream_worker.entries import Entry, Frames
from slotstream_worker.hosted import Hosted

_SOON_MS = 1.0


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

    def keep(self, places: list[int]) -> None:
        """Leave the other sessions' entries out; of rounds of one frame a session."""
        self.entries = {new: self.entries[k] for new, k in enumerate(places) if k in self.entries}
        self.hosted = [self.hosted[k] for k in places]
        self.ids = [self.ids[k] for k in places]
        self.raws = [self.raws[k] for k in places]

    def __bool__(self) -> bool:
        return bool(self.hosted or self.plain)

    def __len__(self) -> int:
        """Sessions that it takes entries of."""
        return len(self.hosted) + len(self.plain)


@dataclass(frozen=True)
class Flying:
    """A round under way on the device; no `flight` where it could not be launched."""

    round: Round
    names: list[str]
    frames: Frames
    from_rest: set[str]
    flight: Flight | None

    @property
    def landing(self) -> bool:
        """Whether it is done, or so soon that it is quicker to wait for it than to look again."""
        return self.flight is None or self.flight.expected_ms < _SOON_MS or self.flight.ready
