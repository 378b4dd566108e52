"""How a graph is to be run: the time step and the choices that NIR leaves open."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from slotstream_worker.nir.errors import BadGraph
from slotstream_worker.nir.fields import Fields
from slotstream_worker.nir.semantics import SEMANTICS, Discretise, Reset, Rule, Semantics


@dataclass(frozen=True)
class Settings:
    """The semantics and what was chosen within them; `dt` in the unit of the graph's `tau`."""

    semantics: Semantics
    reset: Reset
    discretise: Discretise
    dt: float | None

    @classmethod
    def choose(
        cls, semantics: str, reset: str | None, discretise: str | None, dt: float | None
    ) -> Settings:
        """Names to choices; raises `BadGraph` where a choice is none of the semantics'."""
        if semantics not in SEMANTICS:
            raise BadGraph(f"there are the semantics {', '.join(SEMANTICS)}; got {semantics!r}")
        if dt is not None and not (isfinite(dt) and dt > 0):
            raise BadGraph(f"a time step is a number above 0, got dt={dt}")
        chosen = SEMANTICS[semantics]
        return cls(chosen, chosen.reset(reset), chosen.discretise(discretise), dt)

    def step_of(self, fields: Fields) -> float:
        """The time step, which a node needs; raises `BadGraph` where none was given."""
        if self.dt is None:
            raise fields.bad(
                "how far it moves in a step depends on the step's length; say it with --dt (dt), "
                "in the unit of the graph's time constants (seconds in most published graphs)"
            )
        return self.dt

    def rule(self, fields: Fields) -> Rule:
        """The rule for a node with dynamics."""
        return self.semantics.rule(fields.node.kind, str(fields.node))
