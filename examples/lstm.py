"""An nnx LSTM that reads text: a character a step, and how likely each next one is.

    python examples/lstm.py
    slotstream worker --model examples.lstm:model

The module is written as one trains it, over whole batches of sequences `[batch, time]`; nothing in
it knows of streaming. The carries of its two `nnx.RNN`s become the session's state.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from slotstream_worker import StreamModel, models

CHARACTERS = 128  # ASCII

LINES = {
    "melville": "Call me Ishmael. Some years ago - never mind how long precisely - having little "
    "or no money in my purse, and nothing particular to interest me on shore...",
    "austen": "It is a truth universally acknowledged, that a single man in possession of a good "
    "fortune, must be in want of a wife.",
    "dickens": "It was the best of times, it was the worst of times, it was the age of wisdom, it "
    "was the age of foolishness, it was the epoch of belief...",
    "log": "2024-03-01T07:12:44Z pump-3 WARN pressure 4.1 bar below 4.5 bar for 12 s; valve 7 open",
    "json": '{"id": 4711, "kind": "reading", "at": [52.52, 13.40], "celsius": -3.25, "ok": true}',
}


class Writer(nnx.Module):
    """Embedding, two LSTM layers with dropout between, log-probabilities of the next character."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(CHARACTERS, 24, rngs=rngs)
        self.first = nnx.RNN(nnx.OptimizedLSTMCell(24, 48, rngs=rngs))
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.second = nnx.RNN(nnx.LSTMCell(48, 48, rngs=rngs))
        self.head = nnx.Linear(48, CHARACTERS, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        """Map characters, int32 `[batch, time]`, to `[batch, time, 128]`."""
        h = self.second(self.drop(self.first(self.embed(text))))
        return nnx.log_softmax(self.head(h))


def model() -> StreamModel:
    """Serve it: four characters a frame, back the log-probabilities after the last of them."""
    return models.nnx(
        Writer(nnx.Rngs(0)),
        frame=4,
        sample_shape=(),
        dtype="int32",
        outputs="last",
        batch_major=True,
    )


def streams() -> dict[str, np.ndarray]:
    """A text each, as character codes `[steps]`."""
    return {name: np.frombuffer(text.encode("ascii"), np.uint8) for name, text in LINES.items()}


def direct(stream: np.ndarray) -> jax.Array:
    """What the module makes of a whole text."""
    writer = Writer(nnx.Rngs(0))
    writer.eval()
    return writer(jnp.asarray(stream)[None])[0]


if __name__ == "__main__":
    from serve import demonstrate

    demonstrate(model(), streams(), direct)
