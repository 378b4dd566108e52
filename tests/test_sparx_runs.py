"""`--model sparx:RUN`: what is asked of a run; and, where sparx is installed, a run served."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotstream_worker import StreamServer, sparx_runs
from slotstream_worker.loading import BadTarget, TargetOptions, load

SPARX = importlib.util.find_spec("sparx") is not None


@pytest.mark.skipif(SPARX, reason="sparx is installed")
def test_without_sparx_it_says_what_to_install() -> None:
    with pytest.raises(BadTarget, match=r"needs sparx, .* pip install sparxml"):
        load("sparx:runs/shd")


def test_an_option_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(BadTarget, match=r"outputs, step, ema, trust .* got 'frame'"):
        load("sparx:runs/shd?frame=10")
    with pytest.raises(BadTarget, match="step= is a whole number, got 'last'"):
        load("sparx:runs/shd?step=last")
    with pytest.raises(BadTarget, match=r"sparx:RUN takes --frame, and --dt was given"):
        load("sparx:runs/shd", TargetOptions(frame=5, dt=1e-3))


def test_a_run_is_named() -> None:
    with pytest.raises(BadTarget, match="a model is sparx:RUN; got 'sparx:'"):
        load("sparx:")


def test_what_is_no_directory_is_never_looked_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparx_runs.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(sparx_runs, "_task", lambda *_: pytest.fail("it was looked for"))
    with pytest.raises(BadTarget, match=f"no run at {tmp_path}/none"):
        load(f"sparx:{tmp_path}/none")


@pytest.mark.skipif(not SPARX, reason="sparx is not installed: it needs Python 3.12")
def test_a_run_is_served_as_it_is_deployed(tmp_path: Path) -> None:
    """As `dew.pipeline` gives it: its variables, and its `call`."""
    import jax
    from compat.families.sparx import train

    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    directory = train(tmp_path)
    import dew

    task: Any = dew.pipeline(str(directory), trust=("sparx",))
    assert task.call == {"sigma": 0.0}
    model = load(f"sparx:{directory}?outputs=last", TargetOptions(frame=5))
    assert model.frame_shape == (5, 12)
    stream = np.random.default_rng(1).poisson(0.5, (20, 12)).astype("float32")
    server = StreamServer(model, slots=2, row_counts=(2,))
    session = server.open()
    futures = [server.submit(session, stream[k : k + 5]) for k in range(0, 20, 5)]
    server.run()
    whole = task.model.apply(task.variables, stream[:, None], train=False, **task.call)[:, 0]
    assert np.abs(whole).max() > 0
    served = np.stack([future.result() for future in futures])
    np.testing.assert_allclose(served, whole[4::5], rtol=1e-5, atol=1e-6)
    with pytest.raises(BadTarget, match="cannot be read"):
        load(f"sparx:{tmp_path}")
