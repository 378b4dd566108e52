"""Executable model of the wire protocol: scripts, workers, producers, faults, oracle.

`redis` holds the scripts (each method is one atomic script or command), `worker`
and `producer` the actors, `oracle` the truth they are checked against, `sim` the
seeded scheduler that interleaves them at every step between two commands.
Whoever changes a rule of the protocol changes it here first.
"""

from protocol_model.sim import MUTANTS, Sim, search
from protocol_model.types import Violation

__all__ = ["MUTANTS", "Sim", "Violation", "search"]
