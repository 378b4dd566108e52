"""What a load is asked to be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """One load, in the order the command line has it.

    Attributes:
        sessions: how many sessions are opened.
        rate_hz: frames a second of each; 0 for as fast as the windows allow.
        duration_s: for how long frames are due.
        window: entries that each session may have in flight.
        seed: of the random frames, and of where in them each session starts.
        wait_s: how long nothing may come, before what is missing counts as lost.
    """

    sessions: int
    rate_hz: float
    duration_s: float
    window: int = 64
    seed: int = 0
    wait_s: float = 30.0

    def __post_init__(self) -> None:
        if self.sessions < 1:
            raise ValueError(f"a load has at least 1 session, got {self.sessions}")
        if self.window < 1:
            raise ValueError(f"the window is at least 1 frame, got {self.window}")
        if self.rate_hz < 0:
            raise ValueError(f"a rate is 0 (as fast as possible) or more, got {self.rate_hz}")
        if self.duration_s <= 0 or self.wait_s <= 0:
            raise ValueError(
                "a load and the wait for its replies take more than 0 s, "
                f"got {self.duration_s} s and {self.wait_s} s"
            )

    @property
    def asked_hz(self) -> float:
        """Frames a second of all sessions; 0 where no rate is set."""
        return self.rate_hz * self.sessions

    @property
    def due(self) -> int:
        """Frames that are due in all; 0 where no rate is set."""
        return int(self.asked_hz * self.duration_s)
