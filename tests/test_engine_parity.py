"""A session's outputs are those of one call over its whole stream, whatever its company."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from serving_models import ENGINE_MODELS, direct
from slotstream_worker import StreamModel, StreamServer
from slotstream_worker.engine.building import build
from slotstream_worker.engine.model import random_frames
from slotstream_worker.engine.pool import Pool

Outputs = dict[str, np.ndarray[Any, Any]]
SLOTS, LONGEST = 12, 6
PRECISE, SINGLE = np.dtype(np.float64), np.dtype(np.float32)


@pytest.fixture(autouse=True)
def _compile_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and forks are not used here, and compiling them for every model takes a minute."""
    monkeypatch.setattr(Pool, "warm", lambda _: None)


@functools.cache
def model_of(name: str, dtype: np.dtype[Any]) -> StreamModel:
    if dtype == PRECISE and name not in ("gru", "lstm", "function"):
        # The linen modules compute in the dtype of their frames and weights.
        single = model_of(name, SINGLE)
        weights = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), single.variables)
        return build(
            single.name,
            single.apply,
            weights,
            frame=single.frame,
            sample_shape=single.sample_shape,
            dtype=dtype,
        )
    return ENGINE_MODELS[name](dtype.type)


@functools.cache
def server_of(name: str, dtype: np.dtype[Any], slots: int = SLOTS) -> StreamServer:
    """A server that tests share; each of them leaves it empty."""
    return StreamServer(model_of(name, dtype), slots=slots, row_counts=(4,))


def streams(model: StreamModel, lengths: Sequence[int], seed: int) -> list[np.ndarray[Any, Any]]:
    """One stream `[frames, frame, *sample_shape]` a length, each on a scale of its own."""
    rng = np.random.default_rng(seed)
    return [
        random_frames(rng, (n, *model.frame_shape), model.dtype)
        * np.asarray(rng.uniform(0.5, 2.0), model.dtype)
        for n in lengths
    ]


def whole(model: StreamModel, stream: np.ndarray[Any, Any]) -> Outputs:
    """Direct outputs of a stream; zeros after its end save a compilation for every length."""
    padded = np.zeros((LONGEST, *model.frame_shape), model.dtype)
    padded[: len(stream)] = stream
    steps = len(stream) * model.frame
    outputs = direct(model, padded.reshape(-1, *model.sample_shape))
    return {name: array[:steps] for name, array in outputs.items()}


def as_outputs(result: Any) -> Outputs:
    return result if isinstance(result, dict) else {"output": result}


def joined(frames: Sequence[Any]) -> Outputs:
    """Outputs of a session's frames, joined in time."""
    parts = [as_outputs(frame) for frame in frames]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def assert_same_bits(got: Outputs, expected: Outputs, what: object = "") -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        assert got[name].tobytes() == array.tobytes(), f"{name} {what}"


def assert_close(got: Outputs, expected: Outputs, tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert (got[name].shape, got[name].dtype) == (array.shape, array.dtype), name
        if array.dtype.kind in "biu":
            np.testing.assert_array_equal(got[name], array, err_msg=name)
        else:
            np.testing.assert_allclose(got[name], array, rtol=0, atol=tolerance, err_msg=name)


def interleave(
    server: Any,
    work: Sequence[np.ndarray[Any, Any]],
    slots: int,
    seed: int,
) -> tuple[list[list[Any]], dict[int, list[int]]]:
    """Serve all of `work`, more streams than slots, in a random order of opens, frames and pauses.

    Returns every stream's results, and by slot the streams that held it one after another.
    """
    rng = np.random.default_rng(seed)
    waiting, active = list(range(len(work))), {}
    results: list[list[Any]] = [[] for _ in work]
    holders: dict[int, list[int]] = {}
    while waiting or active:
        while waiting and len(active) < slots and rng.random() < 0.7:
            stream, session = waiting.pop(0), server.open()
            active[stream] = session
            holders.setdefault(server.sessions[session], []).append(stream)
        for stream, session in active.items():
            done = len(results[stream])
            if done < len(work[stream]) and rng.random() < 0.6:  # else it pauses
                results[stream].append(server.submit(session, work[stream][done]))
        server.step()
        for stream in [s for s in active if len(results[s]) == len(work[s])]:
            if rng.random() < 0.7:
                server.close(active.pop(stream))
    return [[future.result(timeout=0) for future in futures] for futures in results], holders


@pytest.mark.parametrize("name", ENGINE_MODELS)
def test_interleaved_sessions_equal_one_call_over_each_whole_stream(name: str, x64: None) -> None:
    server = server_of(name, PRECISE)
    work = streams(server.model, [6, 3, 5, 6, 2, 3, 6, 4, 3, 6, 1, 6, 6, 5, 3, 6], seed=11)
    assert work[0].dtype == np.float64
    results, holders = interleave(server, work, slots=SLOTS // 2 + 1, seed=5)
    assert max(map(len, holders.values())) > 1, "no freed slot was taken over"
    for stream, frames in zip(work, results, strict=True):
        expected = whole(server.model, stream)
        assert any(np.ptp(array.astype(np.float64)) > 0 for array in expected.values())
        assert_close(joined(frames), expected, 1e-12)
    assert server.sessions == {}


@pytest.mark.parametrize("name", ENGINE_MODELS)
def test_two_frames_of_one_round_each_equal_their_own_stream_when_queued_together(
    name: str, x64: None
) -> None:
    server = server_of(name, PRECISE)
    work = streams(server.model, [3] * SLOTS, seed=12)
    sessions = [server.open() for _ in work]
    futures = [
        [server.submit(session, frame) for frame in stream]
        for session, stream in zip(sessions, work, strict=True)
    ]
    server.run()
    for stream, frames, session in zip(work, futures, sessions, strict=True):
        expected = whole(server.model, stream)
        assert_close(joined([f.result(timeout=0) for f in frames]), expected, 1e-12)
        server.close(session)


def among(
    server: StreamServer,
    stream: np.ndarray[Any, Any],
    others: int,
    *,
    seed: int,
    place: int = 0,
    nan: bool = False,
    pauses: bool = False,
) -> Outputs:
    """The stream's outputs beside `others` sessions, opened after `place` of them."""
    rng = np.random.default_rng(seed)
    company = [server.open() for _ in range(place)]
    mine = server.open()
    company += [server.open() for _ in range(others - place)]
    shape, dtype = server.model.frame_shape, server.model.dtype
    results = []
    for frame in stream:
        for session in company:
            if not pauses or rng.random() < 0.5:
                noise = random_frames(rng, shape, dtype)
                server.submit(session, np.full_like(noise, np.nan) if nan else 3 * noise)
        if pauses and rng.random() < 0.5:
            server.step()  # a round without this session
        future = server.submit(mine, frame)
        server.run()
        results.append(future.result(timeout=0))
    for session in [mine, *company]:
        server.close(session)
    return joined(results)


@pytest.mark.parametrize("name", ENGINE_MODELS)
def test_a_sessions_bits_do_not_depend_on_its_company(name: str) -> None:
    server = server_of(name, SINGLE)
    (stream,) = streams(server.model, [5], seed=21)
    alone = among(server, stream, 0, seed=0)
    assert any(np.ptp(array.astype(np.float64)) > 0 for array in alone.values())
    companies = {
        "among 3": {"others": 2},
        "among 3, at another row": {"others": 2, "place": 2},
        "among 11, three launches": {"others": 10},
        "among 11, in the last launch": {"others": 10, "place": 10},
        "among 11 that come and go": {"others": 10, "place": 5, "pauses": True},
        "beside NaN in its launch": {"others": 3, "place": 1, "nan": True},
        "beside NaN everywhere": {"others": 11, "place": 6, "nan": True},
        "alone again, after NaN": {"others": 0},
    }
    for seed, (what, company) in enumerate(companies.items()):
        assert_same_bits(among(server, stream, seed=seed + 1, **company), alone, what)


@pytest.mark.parametrize("name", ENGINE_MODELS)
def test_a_sessions_bits_do_not_depend_on_its_slot(name: str) -> None:
    server = server_of(name, SINGLE)
    (stream,) = streams(server.model, [3], seed=22)
    seen = []
    for place in (0, 3, SLOTS - 1):
        # Hold slots back so that the stream's session gets another one.
        holders = [server.open() for _ in range(place)]
        session = server.open()
        slot = server.sessions[session]
        frames = []
        for frame in stream:
            future = server.submit(session, frame)
            server.run()
            frames.append(future.result(timeout=0))
        seen.append((slot, joined(frames)))
        for other in [session, *holders]:
            server.close(other)
    assert len({slot for slot, _ in seen}) == 3
    for slot, outputs in seen:
        assert_same_bits(outputs, seen[0][1], f"at slot {slot}")


@pytest.mark.parametrize("name", ["recurrent", "function"])
def test_the_row_counts_that_the_probe_chooses_keep_every_bit_in_any_company(name: str) -> None:
    server = StreamServer(model_of(name, SINGLE), slots=SLOTS)
    assert server.engine.probed is not None
    assert [m.count for m in server.engine.probed.measured] == [1, 4, 16]
    (stream,) = streams(server.model, [4], seed=31)
    alone = among(server, stream, 0, seed=0)
    for others in (1, 2, 3, 4, 7, SLOTS - 1):
        for place in {0, others // 2, others}:
            got = among(server, stream, others, seed=others, place=place, pauses=place > 0)
            assert_same_bits(
                got, alone, f"{others} others, row {place}, of {server.engine.row_counts}"
            )


def test_the_row_counts_that_the_probe_chooses_serve_whole_streams(x64: None) -> None:
    server = StreamServer(model_of("dense", PRECISE), slots=SLOTS)
    work = streams(server.model, [6, 3, 3, 6, 1, 6, 5, 3, 4, 3, 6, 6, 2, 3, 6, 6], seed=32)
    results, _ = interleave(server, work, slots=SLOTS, seed=33)
    for stream, frames in zip(work, results, strict=True):
        expected = whole(server.model, stream)
        assert_close(joined(frames), expected, 1e-12)


# The nearest relative: its models served here, and its server beside this one.

needs_sparx = pytest.mark.skipif(
    sys.version_info < (3, 12) or importlib.util.find_spec("sparx") is None,
    reason="sparx (sparxml on PyPI) needs Python 3.12 or later and is not installed here",
)

SPARX = ("plain", "recurrent ALIF", "delayed", "SEWResNet")


@pytest.fixture
def sparx_numerics(x64: None) -> Iterator[None]:
    """Float64, with the promotion that sparx's own code relies on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def sparx_model(kind: str) -> tuple[Any, Any, tuple[int, ...]]:
    """A sparx module, variables that make its neurons fire, and its sample shape."""
    from sparx.models import SEWResNet, SpikingMLP
    from sparx.nn import ALIF, LIF

    numerics = {"dtype": np.float64, "param_dtype": np.float64}
    module, shape = {
        "plain": lambda: (SpikingMLP((12, 8), 3, **numerics), (6,)),
        "recurrent ALIF": lambda: (
            SpikingMLP((10,), 3, neuron=ALIF(), recurrent=True, **numerics),
            (6,),
        ),
        "delayed": lambda: (SpikingMLP((9,), 3, delays=(4, 3), **numerics), (6,)),
        "SEWResNet": lambda: (
            SEWResNet((1, 1), 3, width=4, stem="small", neuron=LIF(tau=2.0), **numerics),
            (6, 6, 2),
        ),
    }[kind]()
    init = jax.jit(functools.partial(module.init, train=False))
    variables = init(jax.random.key(4), np.zeros((4, 1, *shape)))
    params = jax.tree.map(lambda w: w * (3.0 if w.ndim > 1 else 1.0), variables["params"])
    kept = {name: tree for name, tree in variables.items() if name != "state"}
    return module, {**kept, "params": params}, shape


@functools.cache
def sparx_server(kind: str) -> StreamServer:
    module, variables, shape = sparx_model(kind)
    return StreamServer(
        module, variables, slots=5, frame=4, sample_shape=shape, dtype=np.float64, row_counts=(4,)
    )


@needs_sparx
@pytest.mark.parametrize("kind", SPARX)
def test_sparx_models_served_here_equal_direct_calls(kind: str, sparx_numerics: None) -> None:
    module, variables, shape = sparx_model(kind)
    server = sparx_server(kind)
    work = streams(server.model, [4, 2, 4, 4, 2, 4, 2, 4], seed=41)
    results, holders = interleave(server, work, slots=5, seed=42)
    assert max(map(len, holders.values())) > 1
    whole = jax.jit(functools.partial(module.apply, mutable=["state"], train=False))
    for stream, frames in zip(work, results, strict=True):
        expected, _ = whole(variables, stream.reshape(-1, 1, *shape))
        assert np.ptp(expected) > 0
        np.testing.assert_allclose(np.concatenate(frames), expected[:, 0], rtol=0, atol=1e-12)


@needs_sparx
@pytest.mark.parametrize("kind", SPARX)
def test_sparx_models_served_here_equal_what_sparxs_own_server_gives(
    kind: str, sparx_numerics: None
) -> None:
    from sparx.serve import StreamServer as SparxServer

    module, variables, shape = sparx_model(kind)
    ours = sparx_server(kind)
    theirs = SparxServer(module, variables, slots=5, frame=4, sample_shape=shape, dtype=np.float64)
    work = streams(ours.model, [4, 2, 4, 4, 2, 4, 2, 4], seed=43)
    here, our_holders = interleave(ours, work, slots=5, seed=44)
    there, their_holders = interleave(theirs, work, slots=5, seed=44)
    # The same calls mean the same: the same streams follow one another in a slot.
    assert sorted(our_holders.values()) == sorted(their_holders.values())
    for mine, other in zip(here, there, strict=True):
        assert np.ptp(np.concatenate(other)) > 0
        np.testing.assert_allclose(np.concatenate(mine), np.concatenate(other), rtol=0, atol=1e-12)
