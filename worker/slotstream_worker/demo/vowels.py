"""The Japanese Vowels recordings: nine speakers, each saying the vowels /ae/ many times.

Source: M. Kudo, J. Toyama and M. Shimbo, "Multidimensional curve classification using
passing-through regions", Pattern Recognition Letters 20 (11-13), 1103-1111, 1999; UCI Machine
Learning Repository, doi 10.24432/C5NS47, CC BY 4.0. One step is one analysis frame of 25.6 ms,
taken every 6.4 ms of speech sampled at 10 kHz; its twelve channels are LPC cepstrum coefficients
(dimensionless).
"""

import io
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import numpy as np
import numpy.typing as npt

CHANNELS = 12
SPEAKERS = 9
SHORTEST = 7
LONGEST = 29

Split = Literal["train", "test"]


@dataclass(frozen=True, eq=False)
class Utterance:
    """One recording: `steps` float32 [steps, 12] (7 to 29 of them), `speaker` 0 to 8."""

    steps: npt.NDArray[np.float32]
    speaker: int


def load(split: Split) -> list[Utterance]:
    """Return the utterances of a split, in the archive's order: 270 to train, 370 to test."""
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}, expected 'train' or 'test'")
    stored = resources.files("slotstream_worker.demo").joinpath("data", "vowels.npz").read_bytes()
    with np.load(io.BytesIO(stored), allow_pickle=False) as arrays:
        steps = np.asarray(arrays[f"{split}_steps"], dtype=np.float32)
        lengths = np.asarray(arrays[f"{split}_lengths"], dtype=np.int64)
        labels = np.asarray(arrays[f"{split}_labels"], dtype=np.int64)
    # The pieces are views of one array: read-only, so that no caller changes another's data.
    steps.flags.writeable = False
    pieces = np.split(steps, np.cumsum(lengths)[:-1])
    return [
        Utterance(steps=piece, speaker=int(label))
        for piece, label in zip(pieces, labels, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class Padded:
    """Utterances in arrays: x float32 [count, LONGEST, 12], lengths and labels int32 [count]."""

    x: npt.NDArray[np.float32]
    lengths: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]


def pad(utterances: list[Utterance]) -> Padded:
    """Pad the utterances with zeros after their ends, where they no longer matter."""
    x = np.zeros((len(utterances), LONGEST, CHANNELS), np.float32)
    for row, utterance in zip(x, utterances, strict=True):
        row[: len(utterance.steps)] = utterance.steps
    lengths = np.array([len(utterance.steps) for utterance in utterances], np.int32)
    return Padded(x, lengths, np.array([one.speaker for one in utterances], np.int32))


def folds(utterances: list[Utterance], count: int) -> list[int]:
    """Return each utterance's fold: `count` runs of consecutive recordings of each speaker."""
    speakers = [utterance.speaker for utterance in utterances]
    return [
        speakers[:index].count(speaker) * count // speakers.count(speaker)
        for index, speaker in enumerate(speakers)
    ]
