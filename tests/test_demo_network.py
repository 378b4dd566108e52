"""The demo's data and shipped network: accuracy, streaming, and independence of company.

Everything runs on the real recordings: zeros would leave the neurons silent and hide faults.
"""

from collections.abc import Iterator
from functools import partial
from importlib import resources
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from safetensors import safe_open

from slotstream_worker.demo.network import SpeakerNet, classify, load_variables
from slotstream_worker.demo.vowels import (
    CHANNELS,
    LONGEST,
    SHORTEST,
    SPEAKERS,
    Split,
    Utterance,
    load,
)

Outputs = dict[str, npt.NDArray[Any]]

NET = SpeakerNet()


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """The worker's own JAX settings: no implicit promotion of dtypes or of ranks."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module")
def variables() -> dict[str, Any]:
    return load_variables()


@pytest.fixture(scope="module")
def recordings() -> list[Utterance]:
    return load("test")


def padded(utterances: list[Utterance]) -> npt.NDArray[np.float32]:
    """Return the utterances as [LONGEST, batch, 12]: what follows an end doesn't matter."""
    x = np.zeros((LONGEST, len(utterances), CHANNELS), np.float32)
    for row, utterance in enumerate(utterances):
        x[: len(utterance.steps), row] = utterance.steps
    return x


@jax.jit
def advance(variables: Any, state: Any, x: jax.Array) -> tuple[Any, Any]:
    """Call the network once; return its outputs and the state to continue from."""
    outputs, kept = NET.apply({**variables, "state": state}, x, mutable=["state"])
    return outputs, kept["state"]


def whole(variables: Any, x: npt.NDArray[np.float32]) -> tuple[Outputs, Any]:
    """Return the outputs and the last state of one call, from rest, on all of x."""
    outputs, state = advance(variables, {}, jnp.asarray(x))
    return {name: np.asarray(value) for name, value in outputs.items()}, state


def chunked(variables: Any, x: npt.NDArray[np.float32], frame: int) -> tuple[Outputs, Any]:
    """Return the same of calls on `frame` steps at a time (fewer at the end)."""
    state: Any = {}
    pieces: list[Any] = []
    for start in range(0, len(x), frame):
        outputs, state = advance(variables, state, jnp.asarray(x[start : start + frame]))
        pieces.append(outputs)
    joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    return joined, state


@pytest.mark.parametrize(("split", "count"), [("train", 270), ("test", 370)])
def test_recordings(split: Split, count: int) -> None:
    utterances = load(split)
    assert len(utterances) == count
    lengths = [len(utterance.steps) for utterance in utterances]
    assert min(lengths) == SHORTEST
    assert max(lengths) <= LONGEST
    assert {utterance.speaker for utterance in utterances} == set(range(SPEAKERS))
    assert all(utterance.steps.dtype == np.float32 for utterance in utterances)
    assert all(utterance.steps.shape[1] == CHANNELS for utterance in utterances)
    assert all(np.isfinite(utterance.steps).all() for utterance in utterances)


def test_published_counts() -> None:
    """The archive gives the test utterances of each speaker, and lengths of 7 to 29 steps."""
    test = load("test")
    counts = np.bincount([utterance.speaker for utterance in test])
    assert counts.tolist() == [31, 35, 88, 44, 29, 24, 40, 50, 29]
    assert np.bincount([utterance.speaker for utterance in load("train")]).tolist() == [30] * 9
    assert max(len(utterance.steps) for utterance in test) == LONGEST


def test_unknown_split() -> None:
    with pytest.raises(ValueError, match="unknown split"):
        load("validation")  # type: ignore[arg-type]


def test_accuracy(variables: dict[str, Any], recordings: list[Utterance]) -> None:
    outputs, _ = whole(variables, padded(recordings))
    right = sum(
        classify(outputs["scores"][: len(utterance.steps), row]) == utterance.speaker
        for row, utterance in enumerate(recordings)
    )
    path = resources.files("slotstream_worker.demo").joinpath("data", "weights.safetensors")
    with resources.as_file(path) as file, safe_open(str(file), framework="numpy") as stored:
        metadata = stored.metadata()
    accuracy = right / len(recordings)
    assert accuracy == pytest.approx(float(metadata["test_accuracy"]), abs=1e-4)
    assert accuracy >= 0.93
    assert metadata["data_doi"] == "10.24432/C5NS47"


def test_outputs(variables: dict[str, Any], recordings: list[Utterance]) -> None:
    x = padded(recordings[::20])
    outputs, _ = whole(variables, x)
    assert outputs["scores"].shape == (LONGEST, x.shape[1], SPEAKERS)
    assert outputs["scores"].dtype == np.float32
    assert outputs["spikes"].shape == (LONGEST, x.shape[1], sum(NET.hidden))
    assert outputs["spikes"].dtype == np.uint8
    assert set(np.unique(outputs["spikes"])) == {0, 1}
    # Every layer fires (the second one sparsely), and none all the time.
    for layer in np.split(outputs["spikes"], np.cumsum(NET.hidden)[:-1], axis=-1):
        assert 0.002 < layer.mean() < 0.5


@pytest.mark.parametrize("frame", [1, 3])
@pytest.mark.parametrize("batch", [1, 6])
def test_frames(
    variables: dict[str, Any], recordings: list[Utterance], frame: int, batch: int
) -> None:
    """Calls on frames, handing on the state, give the outputs and last state of one call."""
    rows = np.random.default_rng(batch).choice(len(recordings), batch, replace=False)
    x = padded([recordings[row] for row in rows])
    expected, last = whole(variables, x)
    outputs, state = chunked(variables, x, frame)
    np.testing.assert_array_equal(outputs["spikes"], expected["spikes"])
    np.testing.assert_allclose(outputs["scores"], expected["scores"], rtol=0, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), dict(state), dict(last)
    )


def seat(place: int, company: jax.Array, own: jax.Array) -> npt.NDArray[np.float32]:
    """Return a state leaf of a batch with a session's own leaf at a place."""
    leaf = np.array(company)
    leaf[place] = own
    return leaf


@pytest.mark.parametrize("frame", [1, 3])
def test_company(variables: dict[str, Any], recordings: list[Utterance], frame: int) -> None:
    """A session alone, and in random company that changes at each frame, hears the same."""
    rng = np.random.default_rng(7)
    x = padded(recordings)
    own = 123
    expected, _ = whole(variables, x[:, own : own + 1])
    fresh = NET.init(jax.random.key(0), jnp.asarray(x[:1, :1]))
    state = jax.tree.map(itemgetter(0), fresh["state"])
    for start in range(0, LONGEST, frame):
        size = int(rng.choice((2, 7)))
        place = int(rng.integers(size))
        rows = rng.choice(len(recordings), size, replace=False)
        rows[place] = own
        # The company is in the middle of its own recordings, not at rest.
        _, others = whole(variables, x[:8, rows])
        state = jax.tree.map(partial(seat, place), others, state)
        frames = jnp.asarray(x[start : start + frame, rows])
        outputs, kept = advance(variables, state, frames)
        state = jax.tree.map(itemgetter(place), jax.device_get(kept))
        stop = start + len(frames)
        np.testing.assert_array_equal(
            outputs["spikes"][:, place], expected["spikes"][start:stop, 0]
        )
        np.testing.assert_allclose(
            outputs["scores"][:, place], expected["scores"][start:stop, 0], rtol=0, atol=1e-5
        )


def test_state(variables: dict[str, Any], recordings: list[Utterance]) -> None:
    """Each leaf is [batch, ...] float32, in all under 4 KiB a session; `init` leaves the rest."""
    x = padded(recordings[:6])
    _, state = whole(variables, x)
    leaves = jax.tree.leaves(state)
    assert leaves
    assert all(leaf.shape[0] == 6 and leaf.dtype == jnp.float32 for leaf in leaves)
    assert sum(leaf[0].nbytes for leaf in leaves) < 4096
    assert any(bool(jnp.any(leaf != jnp.zeros_like(leaf))) for leaf in leaves)
    fresh = NET.init(jax.random.key(0), jnp.asarray(x[:1]))
    jax.tree.map(
        lambda a, b: np.testing.assert_equal(a.shape[1:], b.shape[1:]), fresh["state"], state
    )
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(fresh["state"]))


def test_size(variables: dict[str, Any]) -> None:
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) < 200_000
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
