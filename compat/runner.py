"""Serving a case's sessions in random company, and comparing them with the package's own call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from compat.case import Case
from slotstream_worker import CannotStream, StreamModel, StreamServer
from slotstream_worker.engine.model import random_frames

SLOTS = 3
ROW_COUNTS = ((4,), (1, 2, 8))
"""Rows of a launch. The others are tried where a row of the first rounds by its place in the
launch, which the engine's own measurement finds out; all at once would take thrice as long."""
LENGTHS = (4, 1, 5, 2, 5, 3)
"""Frames of each session. There are more sessions than slots, so that rows are used again."""
TOLERANCE = 1e-4
"""Largest difference, in units of the largest output, that is put down to rounding: the package's
call is another program, which sums in another order."""


@dataclass(frozen=True)
class Result:
    """What was seen of one case.

    `verdict` is one of `bitwise` (the package's bits), `rounding` (within `TOLERANCE`), `differs`,
    `refused` (`CannotStream`; `reason` says why) and `failed` (`reason` is the error). `difference`
    is the largest from the package's own call, `scale` the largest output, `company` whether two
    servings in different company gave the same bits, `state_bytes` those of a session, `rows` those
    of a launch.
    """

    case: str
    verdict: str
    reason: str = ""
    adapter: str = ""
    state: str = ""
    state_bytes: int = 0
    sessions: int = 0
    frames: int = 0
    scale: float = 0.0
    difference: float = 0.0
    company: bool = False
    rows: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def run(name: str, make: Callable[[], Case]) -> Result:
    """Make a case, serve it twice in different company, and compare."""
    try:
        case = make()
        return compare(name, case)
    except CannotStream as error:
        return Result(name, "refused", str(error))
    except Exception as error:  # of a package that may do anything: one line of the table
        return Result(name, "failed", f"{type(error).__name__}: {error}")


def compare(name: str, case: Case) -> Result:
    """Serve a case and judge it; errors are the caller's."""
    model = case.model
    streams = [_stream(case, seed, frames) for seed, frames in enumerate(LENGTHS)]
    server = serving(model)
    found = interleaved(server, streams, seed=1)
    again = interleaved(server, streams, seed=2)
    whole = jax.jit(case.whole)
    difference, scale, equal = 0.0, 0.0, True
    for stream, frames in zip(streams, found, strict=True):
        expected = _whole(whole, stream)
        for got, want in _pairs(name, _joined(frames), expected):
            equal &= got.tobytes() == want.tobytes()
            difference = max(difference, _farthest(got, want))
            scale = max(scale, float(np.nanmax(np.abs(want), initial=0.0)))
    if scale == 0.0:
        raise ValueError(f"every output of {name} is zero, so nothing was compared")
    verdict = "bitwise" if equal else "rounding" if difference <= TOLERANCE * scale else "differs"
    return Result(
        name,
        verdict,
        adapter=case.adapter,
        state=_kinds(model),
        state_bytes=model.spec.row_bytes,
        sessions=len(streams),
        frames=sum(LENGTHS),
        scale=scale,
        difference=difference,
        company=_bits(found) == _bits(again),
        rows=server.engine.row_counts,
    )


def serving(model: StreamModel) -> StreamServer:
    """A server of the model, with the first row counts that it can be served with.

    Raises:
        CannotStream: there are none.
    """
    for counts in ROW_COUNTS[:-1]:
        try:
            return StreamServer(model, slots=SLOTS, row_counts=counts)
        except CannotStream:
            continue
    return StreamServer(model, slots=SLOTS, row_counts=ROW_COUNTS[-1])


def interleaved(
    server: StreamServer, streams: list[np.ndarray[Any, Any]], seed: int
) -> list[list[Any]]:
    """Outputs of each stream's frames, served beside whoever else is there.

    Sessions come in a random order as slots are free, and push in random rounds.
    """
    rng = np.random.default_rng(seed)
    waiting = [int(k) for k in rng.permutation(len(streams))]
    here: dict[int, tuple[int, int]] = {}  # session: its stream, and its next frame
    found: list[list[Any]] = [[] for _ in streams]
    while waiting or here:
        while waiting and len(here) < server.slots:
            here[server.open()] = waiting.pop(), 0
        pushing = [session for session in here if rng.random() < 0.6]
        futures = {s: server.submit(s, streams[here[s][0]][here[s][1]]) for s in pushing}
        server.run()
        for session, future in futures.items():
            k, at = here[session]
            found[k].append(future.result())
            here[session] = k, at + 1
            if at + 1 == len(streams[k]):
                server.close(session)
                del here[session]
    return found


def _stream(case: Case, seed: int, frames: int) -> np.ndarray[Any, Any]:
    """A session's stream `[frames, frame, *sample_shape]`."""
    rng, model = np.random.default_rng([seed, frames]), case.model
    steps = frames * model.frame
    make = case.streams or (
        lambda rng, steps: random_frames(rng, (steps, *model.sample_shape), model.dtype)
    )
    made = np.asarray(make(rng, steps), model.dtype)
    return made.reshape(frames, *model.frame_shape)


def _whole(whole: Callable[[Any], Any], stream: np.ndarray[Any, Any]) -> Any:
    """The package's outputs over the stream.

    Zeros behind its end save compiling for each length; where those changed what came before, the
    model would look ahead, and had been refused.
    """
    steps = stream.shape[0] * stream.shape[1]
    flat = stream.reshape(steps, *stream.shape[2:])
    padded = np.zeros((max(LENGTHS) * stream.shape[1], *flat.shape[1:]), flat.dtype)
    padded[:steps] = flat
    return jax.tree.map(lambda y: np.asarray(y)[:steps], whole(jnp.asarray(padded)))


def _joined(frames: list[Any]) -> Any:
    return jax.tree.map(lambda *parts: np.concatenate(parts), *frames)


def _pairs(name: str, served: Any, expected: Any) -> list[tuple[Any, Any]]:
    """Outputs by name, served and expected; what is not of one shape and dtype is no comparison."""
    if jax.tree.structure(served) != jax.tree.structure(expected):
        raise ValueError(f"{name} gives {jax.tree.structure(served)}, its package "
                         f"{jax.tree.structure(expected)}")  # fmt: skip
    pairs = list(zip(jax.tree.leaves(served), jax.tree.leaves(expected), strict=True))
    for got, want in pairs:
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            raise ValueError(f"{name} gives {got.dtype}{list(got.shape)}, its package "
                             f"{want.dtype}{list(want.shape)}")  # fmt: skip
    return pairs


def _farthest(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    """The largest difference; infinite where one side is no number and the other is."""
    kind = np.complex128 if want.dtype.kind == "c" else np.float64
    a, b = got.astype(kind), want.astype(kind)
    if (np.isnan(a) != np.isnan(b)).any():
        return float("inf")
    return float(np.nanmax(np.abs(a - b), initial=0.0))


def _bits(found: list[list[Any]]) -> list[bytes]:
    return [leaf.tobytes() for leaf in jax.tree.leaves(found)]


def _kinds(model: StreamModel) -> str:
    """Dtypes of the state's leaves, as in `2 float32, bool`."""
    names = [leaf.dtype.name for leaf in model.spec.leaves]
    each = {name: names.count(name) for name in dict.fromkeys(names)}
    return ", ".join(f"{n} {name}" if n > 1 else name for name, n in each.items())
