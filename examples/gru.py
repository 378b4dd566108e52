"""A GRU that reads speech: Flax's own cell, one session a speaker.

    python examples/gru.py
    slotstream worker --model examples.gru:model

The streams are real: the test recordings of the Japanese Vowels, one speaker's after another's
(twelve LPC cepstrum coefficients, a step every 6.4 ms).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from slotstream_worker import StreamModel, models
from slotstream_worker.demo.vowels import CHANNELS, SPEAKERS, load

CELL = nn.GRUCell(features=32)


def variables() -> dict:
    """The cell's variables; a checkpoint of yours goes here."""
    carry = CELL.initialize_carry(jax.random.key(0), (1, CHANNELS))
    return CELL.init(jax.random.key(1), carry, jnp.zeros((1, CHANNELS)))


def model() -> StreamModel:
    """Serve the cell: eight steps a frame, the hidden vector of each back."""
    return models.rnn(CELL, variables(), frame=8, sample_shape=(CHANNELS,))


def streams() -> dict[str, np.ndarray]:
    """Each speaker's recordings in a row, `[steps, 12]`."""
    spoken = load("test")
    return {
        f"speaker-{k}": np.concatenate([one.steps for one in spoken if one.speaker == k])
        for k in range(SPEAKERS)
    }


def direct(stream: np.ndarray) -> jax.Array:
    """What Flax itself makes of a whole stream: `nn.RNN` over all of it."""
    whole = nn.RNN(CELL)
    return whole.apply({"params": {"cell": variables()["params"]}}, jnp.asarray(stream)[None])[0]


if __name__ == "__main__":
    from serve import demonstrate

    demonstrate(model(), streams(), direct)
