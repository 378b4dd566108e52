"""Graphs of the Neuromorphic Intermediate Representation (NIR) as streaming models.

hdf5       a file, checked before it is read       graph      nested graphs taken apart
cycles     order, recurrent edges, loops           program    one time step of the graph
semantics  what frameworks disagree on, as data    membrane   neurons as coefficients
layers, neurons, delay, firing                     the primitives
model      the `StreamModel`
"""

from slotstream_worker.nir.errors import BadGraph
from slotstream_worker.nir.model import nir
from slotstream_worker.nir.semantics import SEMANTICS

__all__ = ["SEMANTICS", "BadGraph", "nir"]
