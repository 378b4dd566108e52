"""A spiking network from a NIR file, as any framework that writes NIR would hand it over.

    python examples/nir_lif.py
    slotstream check examples.nir_lif:model
    slotstream worker --model nir:network.nir --dt 1e-3          # for a file of your own

The graph is made here so that the example needs no file: two layers of leaky integrate-and-fire
neurons, the second recurrent, and a readout. The direct call is a plain loop over NumPy arrays.
"""

import nir
import numpy as np

from slotstream_worker import StreamModel
from slotstream_worker.nir import nir as load

DT, INPUTS, HIDDEN = 1e-3, 20, 24
RNG = np.random.default_rng(5)
W1 = RNG.normal(0, 0.9, (HIDDEN, INPUTS)).astype(np.float32)
W2 = RNG.normal(0, 0.6, (HIDDEN, HIDDEN)).astype(np.float32)
RECURRENT = RNG.normal(0, 0.25, (HIDDEN, HIDDEN)).astype(np.float32)
TAU = np.linspace(4e-3, 2e-2, HIDDEN).astype(np.float32)


def graph() -> nir.NIRGraph:
    """What a framework would have written to a file."""
    ones = np.ones(HIDDEN, np.float32)
    lif = {"tau": TAU, "r": 4 * ones, "v_leak": 0 * ones, "v_threshold": ones}
    return nir.NIRGraph(
        nodes={
            "input": nir.Input({"input": np.array([INPUTS])}),
            "w1": nir.Linear(W1),
            "first": nir.LIF(**lif),
            "w2": nir.Linear(W2),
            "second": nir.LIF(**lif),
            "back": nir.Linear(RECURRENT),
            "output": nir.Output({"output": np.array([HIDDEN])}),
        },
        edges=[
            ("input", "w1"),
            ("w1", "first"),
            ("first", "w2"),
            ("w2", "second"),
            ("second", "back"),
            ("back", "second"),
            ("second", "output"),
        ],
    )


def model() -> StreamModel:
    """Serve the graph: ten steps of a millisecond a frame, spikes back."""
    return load(graph(), dt=DT, frame=10)


def streams() -> dict[str, np.ndarray]:
    """Spike trains of sensors of different rates, `[steps, 20]`."""
    rng = np.random.default_rng(6)
    rates = rng.uniform(0.02, 0.4, (6, 1, INPUTS))
    trains = rng.random((6, 300, INPUTS)) < rates
    return {f"sensor-{k}": train.astype(np.float32) for k, train in enumerate(trains)}


def direct(stream: np.ndarray) -> np.ndarray:
    """The equations of the specification, forward Euler, one step after another."""
    v1, v2 = np.zeros(HIDDEN, np.float32), np.zeros(HIDDEN, np.float32)
    spikes = np.zeros(HIDDEN, np.float32)
    found = []
    for x in np.asarray(stream, np.float32):
        v1 = v1 + np.float32(DT) / TAU * (4 * (W1 @ x) - v1)
        first = (v1 > 1).astype(np.float32)
        v1 = v1 * (1 - first)
        v2 = v2 + np.float32(DT) / TAU * (4 * (W2 @ first + RECURRENT @ spikes) - v2)
        spikes = (v2 > 1).astype(np.float32)
        v2 = v2 * (1 - spikes)
        found.append(spikes)
    return np.stack(found)


if __name__ == "__main__":
    from serve import demonstrate

    demonstrate(model(), streams(), direct)
