"""The command line's options for `--model`: one decorator for every command that loads one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from slotstream_worker.loading import TargetOptions
from slotstream_worker.settings import option

MODEL_HELP = (
    "MODULE:ATTRIBUTE, a callable without arguments that returns a StreamModel, or nir:FILE, a "
    "graph of the Neuromorphic Intermediate Representation, or sparx:RUN, the directory of a run "
    "that sparx trained."
)

_OPTIONS = (
    option(
        "--variables",
        default=None,
        type=click.Path(path_type=Path),
        help="The model's variables: safetensors (one file, or several with an index), an Orbax "
        "checkpoint, Flax msgpack. By default those that MODEL gives it.",
    ),
    option(
        "--dt",
        default=None,
        type=click.FloatRange(min=0, min_open=True),
        help="nir: length of a time step, in the unit of the graph's time constants.",
    ),
    option(
        "--semantics",
        default=None,
        type=click.Choice(["nir", "norse", "snntorch", "spyx", "sinabs"]),
        help="nir: the specification, or the framework whose spikes are wanted.  [default: nir]",
    ),
    option(
        "--reset",
        default=None,
        type=click.Choice(["value", "zero", "subtract"]),
        help="nir: what a spike does to the membrane: to its v_reset, to 0, or down by the "
        "threshold. By default what the semantics do first.",
    ),
    option(
        "--discretise",
        default=None,
        type=click.Choice(["euler", "exact"]),
        help="nir: forward Euler, or the solution for an input that is constant over a step.  "
        "[default: euler]",
    ),
    option(
        "--frame",
        default=None,
        type=click.IntRange(1),
        help="nir, sparx: time steps a frame.  [default: 10]",
    ),
    option(
        "--dtype",
        default=None,
        type=click.Choice(["float32", "float64"]),
        help="nir: of frames, state and outputs.  [default: float32]",
    ),
    option(
        "--max-model-bytes",
        default=None,
        type=click.IntRange(1),
        help="nir: bytes of arrays that a file may declare.  [default: 2 GiB]",
    ),
)


def target_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options for models, as one argument `options`, a `TargetOptions`."""

    @functools.wraps(command)
    def gathered(*args: Any, **kwargs: Any) -> None:
        given = {field.name: kwargs.pop(field.name) for field in fields(TargetOptions)}
        command(*args, options=TargetOptions(**given), **kwargs)

    decorated: Callable[..., None] = gathered
    for one in reversed(_OPTIONS):
        decorated = one(decorated)
    return decorated
