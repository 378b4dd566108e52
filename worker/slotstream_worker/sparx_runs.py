"""Serving what `sparx` trained: `--model sparx:RUN`, RUN being the directory that a run left.

    slotstream worker --model sparx:runs/shd --frame 10
    slotstream check 'sparx:runs/shd?outputs=sum argmax&step=2000'

A run's record names the network, its encoder and the keyword arguments that it is deployed with
(`call`: a trained delay's `sigma`, a mask), and its checkpoints hold the variables, so nothing else
needs to be said. Frames are the encoder's output, time-major `[frame, ...]` float32, as for
`sparx.serve.StreamServer`. A network that no run holds is served from a module of one's own:
`models.linen(network, variables, call=..., frame=..., sample_shape=...)`.

After a question mark may stand, joined with `&`: `outputs` (what a reply carries, in the words of
`engine.picks`), `step` (which checkpoint; the latest by default), `ema` (`0` for the live weights
where the run kept an average), `trust` (packages besides sparx that the record may import, with
commas).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from slotstream_worker.engine.model import StreamModel
from slotstream_worker.engine.models.linen import linen

SCHEME = "sparx"
OPTIONS = ("outputs", "step", "ema", "trust")
FRAME = 10
"""Time steps a frame, where nothing else is asked for."""


class BadRun(ValueError):
    """There is no such run, or not one that holds a network to serve."""


def load(target: str, frame: int = FRAME) -> StreamModel:
    """The network of a run: `DIRECTORY`, or `DIRECTORY?outputs=last`.

    Raises:
        BadRun: no such run, or an option that is none.
        CannotStream: the network cannot be served, with the reason.
    """
    directory, _, query = target.partition("?")
    options = _options(query)
    if importlib.util.find_spec("sparx") is None:
        raise BadRun(
            "a model sparx:RUN needs sparx, which is not installed here: pip install sparxml "
            "(it needs Python 3.12)"
        )
    # Asked first: what is no directory here would be looked for on a hub, and downloaded.
    if not Path(directory).is_dir():
        raise BadRun(f"there is no run at {Path(directory).absolute()}")
    task, sample = _task(directory, options)
    return linen(
        task.model,
        task.variables,
        frame=frame,
        sample_shape=_step_shape(task.encoder, sample),
        call=task.call,
        outputs=options.get("outputs", "all"),
    )


def _options(query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise BadRun(f"a run takes {', '.join(OPTIONS)} after its '?'; got {unknown[0]!r}")
    for name in ("step", "ema"):
        if name in options and not options[name].isdecimal():
            raise BadRun(f"{name}= is a whole number, got {options[name]!r}")
    return options


def _task(directory: str, options: dict[str, str]) -> tuple[Any, tuple[int, ...]]:
    """The run's trained task, and the shape of one record of its data."""
    import dew
    from dew.inference.tasks import run_record

    trust = (SCHEME, *filter(None, options.get("trust", "").split(",")))
    step = int(options["step"]) if "step" in options else None
    ema = bool(int(options["ema"])) if "ema" in options else None
    try:
        saved = run_record(directory, step, trust)
        task = dew.pipeline(directory, step=saved.step, ema=ema, trust=trust)
    except (OSError, ValueError, KeyError) as error:
        raise BadRun(f"the run at {directory} cannot be read: {error}") from error
    missing = [n for n in ("model", "variables", "encoder", "call") if not hasattr(task, n)]
    if missing or "sample" not in saved.record:
        raise BadRun(
            f"the run at {directory} holds a {type(task).__name__}, and a spiking classifier is "
            "needed (sparx.objectives.SpikingClassifierObjective)"
        )
    return task, tuple(saved.record["sample"]["shape"])


def _step_shape(encoder: Any, sample: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one time step of one session, as the encoder hands it to the network."""
    import jax

    record = jax.ShapeDtypeStruct((1, *sample), "float32")
    encoded = jax.eval_shape(encoder, jax.random.key(0), record)
    return tuple(encoded.shape[2:])
