"""The demo's network as a served model: one analysis frame of speech a frame."""

from __future__ import annotations

from slotstream_worker.demo.network import SpeakerNet, load_variables
from slotstream_worker.demo.vowels import CHANNELS
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.engine.models.linen import linen


def model() -> StreamModel:
    """The shipped network: float32 [1, 12] in, `scores` [1, 9] and `spikes` [1, 256] out."""
    return linen(SpeakerNet(), load_variables(), frame=1, sample_shape=(CHANNELS,))
