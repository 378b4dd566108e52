"""Makes the compact copy of the Japanese Vowels recordings from the two `.ts` files.

Usage: ``python -m slotstream_worker.demo.convert TRAIN.ts TEST.ts [--out vowels.npz]``

In the `.ts` text format of time series archives, lines that start with ``#`` are comments and
lines that start with ``@`` are the header; then each line is one utterance: twelve
comma-separated series, split by colons, and the speaker's label ``1`` to ``9`` last.
The data set is doi 10.24432/C5NS47 (Kudo, Toyama and Shimbo 1999).
"""

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slotstream_worker.demo.vowels import CHANNELS, SPEAKERS

DEFAULT_OUT = Path(__file__).parent / "data" / "vowels.npz"


def parse(text: str) -> tuple[list[npt.NDArray[np.float32]], list[int]]:
    """Return each utterance of a `.ts` text as float32 [steps, 12], and its speaker, 0 to 8."""
    series: list[npt.NDArray[np.float32]] = []
    speakers: list[int] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith(("#", "@")):
            continue
        *channels, label = line.strip().split(":")
        if len(channels) != CHANNELS:
            raise ValueError(f"line {number}: {len(channels)} channels, expected {CHANNELS}")
        # np.array refuses channels of unequal lengths, so a torn line can't slip through.
        values = np.array([channel.split(",") for channel in channels], dtype=np.float32)
        speaker = int(label) - 1
        if not 0 <= speaker < SPEAKERS:
            raise ValueError(f"line {number}: speaker {label}, expected 1 to {SPEAKERS}")
        series.append(np.ascontiguousarray(values.T))
        speakers.append(speaker)
    return series, speakers


def pack(split: str, text: str) -> dict[str, npt.NDArray[np.generic]]:
    """Return one split's arrays: steps float32 [total_steps, 12], lengths and labels uint8."""
    series, speakers = parse(text)
    return {
        f"{split}_steps": np.concatenate(series),
        f"{split}_lengths": np.array([len(steps) for steps in series], dtype=np.uint8),
        f"{split}_labels": np.array(speakers, dtype=np.uint8),
    }


def main(arguments: list[str] | None = None) -> None:
    """Read the two files named on the command line and write the compact copy."""
    parser = argparse.ArgumentParser(description="Make vowels.npz from the two .ts files.")
    parser.add_argument("train", type=Path, help="the training split, a .ts file")
    parser.add_argument("test", type=Path, help="the test split, a .ts file")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    options = parser.parse_args(arguments)
    packed = pack("train", options.train.read_text()) | pack("test", options.test.read_text())
    np.savez_compressed(options.out, allow_pickle=False, **packed)
    for name, array in packed.items():
        print(f"{name}: {array.dtype} {list(array.shape)}")


if __name__ == "__main__":
    main()
