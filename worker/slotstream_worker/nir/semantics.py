"""What NIR leaves to its reader, as data: one `Semantics` a framework.

NIR gives neurons as differential equations. A simulator chooses how a step of length `dt` is
taken, whether a neuron spikes before or after it, what a spike does to the membrane, and where
`r`, `w_in` and `dt / tau` go. `nir` is the specification taken by its word; the others compute
what a framework computes, and take only the neurons of which that has been verified against the
framework's own spikes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from slotstream_worker.nir.errors import BadGraph

Reset = Literal["value", "zero", "subtract"]
Discretise = Literal["euler", "exact"]

Gain = Literal["given", "without r", "unit", "unit step", "in the threshold"]
"""What a neuron's input is multiplied with.

`given`: `r`, `w_in` and the time step as the equations say. `without r`: as if `r` were 1.
`unit`: 1, into the current and from there into the membrane, and no leak voltage.
`unit step`: 1, and no `dt`. `in the threshold`: 1, and the threshold is divided by what the gain
would be.
"""

Firing = Literal["at once", "late", "before", "several"]
"""When a neuron spikes and is reset; `firing.py` has the equations."""

Requirement = Literal["no leak voltage", "membrane gain of 1", "current gain of 1", "no cycle"]


@dataclass(frozen=True)
class Rule:
    """How one kind of neuron is computed.

    `reset` is the only one there is, where the framework does not ask. `requires` is what must
    hold for the neuron, since the framework refuses it otherwise or was not verified.
    """

    gain: Gain = "given"
    firing: Firing = "at once"
    reset: Reset | None = None
    requires: tuple[Requirement, ...] = ()


@dataclass(frozen=True)
class Semantics:
    """How a framework computes a graph.

    `rules` has the primitives with dynamics that it takes; those without are the same
    everywhere. The first of `resets` and `discretisations` is the default. `recurrent_bias` is
    when the bias of an Affine on a recurrent edge acts: from the first step, from the second
    (the first has no value of the step before), or never.
    """

    name: str
    rules: Mapping[str, Rule]
    resets: tuple[Reset, ...]
    discretisations: tuple[Discretise, ...] = ("euler",)
    recurrent_bias: Literal["first step", "second step", "never"] = "first step"

    def rule(self, kind: str, called: str) -> Rule:
        """The rule for a primitive with dynamics; raises `BadGraph` where there is none."""
        if kind not in self.rules:
            raise BadGraph(
                f"{called}: the semantics of {self.name} have been verified for "
                f"{', '.join(sorted(self.rules))} and not for {kind}; --semantics nir takes every "
                "primitive"
            )
        return self.rules[kind]

    def reset(self, chosen: str | None) -> Reset:
        """The reset asked for, or the default; raises `BadGraph` where there is no such one."""
        for reset in self.resets:
            if chosen in (None, reset):
                return reset
        raise BadGraph(
            f"the semantics of {self.name} reset by {' or '.join(self.resets)}, and {chosen!r} was "
            "asked for"
        )

    def discretise(self, chosen: str | None) -> Discretise:
        """The discretisation asked for, or the default; raises `BadGraph` likewise."""
        for way in self.discretisations:
            if chosen in (None, way):
                return way
        raise BadGraph(
            f"the semantics of {self.name} discretise by {' or '.join(self.discretisations)}, and "
            f"{chosen!r} was asked for"
        )


NIR = Semantics(
    "nir",
    {kind: Rule() for kind in ("I", "IF", "LI", "LIF", "CubaLI", "CubaLIF", "Delay")},
    resets=("value", "zero", "subtract"),
    discretisations=("euler", "exact"),
)

NORSE = Semantics(  # norse 1.1.0, nirtorch 2.6
    "norse",
    {
        "IF": Rule("unit step", reset="zero"),
        "LIF": Rule("without r", reset="zero", requires=("no leak voltage",)),
        "CubaLIF": Rule(requires=("no leak voltage",)),
    },
    resets=("zero", "subtract"),
    recurrent_bias="second step",
)

SNNTORCH = Semantics(  # snntorch 1.0.0
    "snntorch",
    {
        "LIF": Rule("in the threshold", "late", requires=("no leak voltage", "no cycle")),
        "CubaLIF": Rule(
            "unit",
            "late",
            requires=("no leak voltage", "membrane gain of 1", "current gain of 1"),
        ),
    },
    resets=("zero", "subtract"),
)

SPYX = Semantics(  # spyx 1.0.0
    "spyx",
    {"CubaLIF": Rule("unit", "before")},
    resets=("subtract",),
    recurrent_bias="never",
)

SINABS = Semantics(  # sinabs 3.1.3
    "sinabs",
    {"IF": Rule("unit step", "several")},
    resets=("subtract",),
)

SEMANTICS: dict[str, Semantics] = {s.name: s for s in (NIR, NORSE, SNNTORCH, SPYX, SINABS)}
