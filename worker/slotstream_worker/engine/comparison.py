"""Is what is served what one call over a whole stream gives? Found on random streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slotstream_worker.engine.distance import apart
from slotstream_worker.engine.engine import Engine
from slotstream_worker.engine.model import StreamModel, named
from slotstream_worker.engine.seeds import started

SESSIONS, FRAMES = 6, 5

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Comparison:
    """Two ways to compute the same outputs, and how far they are apart.

    `largest` is the largest difference, `scale` the largest value; `unequal` is how much of the
    outputs, from 0 to 1, is not the same bits.
    """

    what: str
    against: str
    unequal: float
    largest: float
    scale: float

    @property
    def bitwise(self) -> bool:
        """Whether every bit agrees."""
        return self.unequal == 0.0


def compare(
    engine: Engine, *, seed: int = 0, progress: Callable[[int, int], None] = lambda _n, _of: None
) -> tuple[Comparison, Comparison]:
    """Serve random streams in random company; against themselves alone, and against whole calls.

    Args:
        engine: prepared, and empty; it is empty again afterwards.
        seed: of streams and company.
        progress: called with the steps done and their number.

    Returns:
        The comparison with each session alone, which is promised bit for bit, and that with one
        call over the whole stream, which is another compiled program and may round otherwise.
    """
    model, rng = engine.model, np.random.default_rng(seed)
    sessions = min(SESSIONS, engine.pool.slots)
    total = sessions + 2
    streams = model.random_frames(rng, (sessions, FRAMES))
    company = _in_company(engine, streams, rng)
    progress(1, total)
    alone = [_alone(engine, k, stream) for k, stream in enumerate(streams)]
    progress(2, total)
    whole = []
    run = jax.jit(_whole(model))
    begun = [started(model.spec, model.rest(k)) if model.rest else None for k in range(sessions)]
    for k, stream in enumerate(streams):
        whole.append(
            {
                name: np.asarray(array)
                for name, array in run(model.variables, begun[k], stream).items()
            }
        )
        progress(3 + k, total)
    return (
        _differ("in random company", "alone", company, alone),
        _differ("frame by frame", "one whole call", company, whole),
    )


def _whole(model: StreamModel) -> Callable[[Any, Any, Any], dict[str, Any]]:
    """One call over a stream `[frames, frame, *sample]`; outputs `[frames, ...]` as sent."""

    def run(variables: Any, state: Any, stream: Any) -> dict[str, Any]:
        steps = stream.reshape(-1, 1, *stream.shape[2:])
        outputs, _ = model.apply(variables, state, steps)
        frames = jax.tree.map(
            lambda y: jnp.squeeze(y, 1).reshape(len(stream), model.frame, *y.shape[2:]), outputs
        )
        if model.pick is None:
            return named(frames)
        steps = jnp.full(len(stream), model.frame, jnp.int32)
        return named(jax.vmap(model.pick.act)(frames, steps))

    return run


def _alone(engine: Engine, session: int, stream: np.ndarray[Any, Any]) -> Arrays:
    engine.pool.admit([session])
    parts = [engine.run([session], frame[None])[0].outputs for frame in stream]
    engine.pool.release([session])
    return _joined(parts)


def _in_company(
    engine: Engine, streams: np.ndarray[Any, Any], rng: np.random.Generator
) -> list[Arrays]:
    """Each round some of the sessions, in any order, beside strangers who come and go."""
    model, pool = engine.model, engine.pool
    at = [0] * len(streams)
    found: list[list[Arrays]] = [[] for _ in streams]
    pool.admit(range(len(streams)))
    strangers: list[str] = []
    for n in range(50 * FRAMES):
        going = [k for k in rng.permutation(len(streams)).tolist() if at[k] < FRAMES]
        if not going:
            break
        going = going[: int(rng.integers(1, len(going) + 1))]
        pool.release(strangers)
        most = min(pool.slots - len(streams), 8)
        strangers = [f"stranger {n} {k}" for k in range(int(rng.integers(0, most + 1)))]
        pool.admit(strangers)
        frames = np.concatenate(
            [
                np.stack([streams[k, at[k]] for k in going]),
                model.random_frames(rng, (len(strangers),)),
            ]
        )
        order = rng.permutation(len(frames)).tolist()
        names: list[Any] = [*going, *strangers]
        for ran in engine.run([names[k] for k in order], frames[order]):
            for k, session in enumerate(ran.sessions):
                if isinstance(session, int):
                    found[session].append({name: a[k : k + 1] for name, a in ran.outputs.items()})
        for k in going:
            at[k] += 1
    pool.release([*strangers, *range(len(streams))])
    return [_joined(parts) for parts in found]


def _joined(parts: list[Arrays]) -> Arrays:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _differ(what: str, against: str, one: list[Arrays], other: list[Arrays]) -> Comparison:
    pairs = [(x, b[name]) for a, b in zip(one, other, strict=True) for name, x in a.items()]
    unequal = sum(_unequal(x, y) for x, y in pairs)
    elements = sum(x.size for x, _ in pairs)
    return Comparison(what, against, unequal / max(elements, 1), *apart(pairs))


def _unequal(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> int:
    """Elements that are not the same bits."""
    x, y = (
        np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, array.dtype.itemsize)
        for array in (one, other)
    )
    return int((x != y).any(axis=1).sum())
