"""The examples run as they stand, and their served sessions equal their direct calls."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from examples.serve import demonstrate, in_frames, picked

from slotstream_worker.engine.model import StreamModel
from slotstream_worker.loading import load

ROOT = Path(__file__).parent.parent
NAMES = sorted(path.stem for path in ROOT.glob("examples/[a-z]*.py") if path.stem != "serve")


@pytest.fixture(autouse=True)
def _as_people_have_them() -> Iterator[None]:
    """JAX's implicit promotions, which this suite else forbids, are allowed in every thread."""
    before = jax.config.jax_numpy_dtype_promotion, jax.config.jax_numpy_rank_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_dtype_promotion", before[0])
    jax.config.update("jax_numpy_rank_promotion", before[1])


def test_there_is_an_example_of_each_kind() -> None:
    assert {"gru", "lstm", "mamba2", "nir_lif", "lmu", "spiking_conv"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_serves_its_streams_and_agrees(name: str, capsys: Any) -> None:
    example = importlib.import_module(f"examples.{name}")
    model = load(f"examples.{name}:model")
    assert isinstance(model, StreamModel)
    assert model.spec.row_bytes
    streams = example.streams()
    assert len({stream.tobytes() for stream in streams.values()}) == len(streams) >= 4
    demonstrate(model, streams, example.direct)
    printed = capsys.readouterr().out
    assert printed.endswith("they agree\n")
    for session in streams:
        assert session in printed


def test_an_example_whose_direct_call_differs_says_so_and_fails(capsys: Any) -> None:
    from examples import lmu

    def off(stream: Any) -> Any:
        outputs = dict(lmu.direct(stream))
        outputs["hidden"] = outputs["hidden"].at[-1, 3].add(1e-3)
        return outputs

    walking = {"walking": lmu.streams()["walking"][:20]}
    with pytest.raises(SystemExit) as left:
        demonstrate(lmu.model(), walking, off)
    assert left.value.code == 1
    assert "THEY DIFFER" in capsys.readouterr().out


def test_a_stream_is_cut_into_whole_frames_and_a_pick_acts_on_each() -> None:
    from examples import lstm

    model = lstm.model()
    frames = in_frames(model, np.arange(10))
    assert (frames.shape, frames.dtype) == ((2, 4), np.int32)
    outputs = np.arange(16, dtype=np.float32).reshape(8, 2)
    np.testing.assert_array_equal(picked(model, outputs, 2), outputs[[3, 7]])


def test_an_example_runs_by_itself() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "lmu.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("they agree\n")
