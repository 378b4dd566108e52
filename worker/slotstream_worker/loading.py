"""Finding the model that `--model TARGET` names.

A target is `SCHEME:REST` for one of `SCHEMES`, else `MODULE:ATTRIBUTE`. Each scheme says which
options it takes; one that it does not take is an error, since it would change nothing.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from slotstream_worker.engine.model import StreamModel


class BadTarget(ValueError):
    """`--model` names nothing that can be served; says what was looked for and what was found."""


@dataclass(frozen=True)
class TargetOptions:
    """How a target is to be read: the command line's options for models, None where not given.

    What each means is the scheme's to say; see `slotstream worker --help`.
    """

    dt: float | None = None
    semantics: str | None = None
    reset: str | None = None
    discretise: str | None = None
    frame: int | None = None
    dtype: str | None = None
    max_model_bytes: int | None = None
    variables: Path | None = None

    def given(self) -> dict[str, object]:
        """The options that were given, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Scheme:
    """A way to name a model: what follows the colon, the options taken, and how it is loaded."""

    rest: str
    takes: frozenset[str]
    load: Callable[[str, TargetOptions], StreamModel]


def load(target: str, options: TargetOptions | None = None) -> StreamModel:
    """The `StreamModel` that a target gives.

    `MODULE:ATTRIBUTE` is imported and called. A module that does not exist is told apart from
    one that fails while it is imported: the latter's own error is raised.

    Raises:
        BadTarget: the target names nothing, gives something else, or does not take the options;
            or the variables do not fit it.
        CannotStream: the model is there and cannot be served.
    """
    options = options or TargetOptions()
    if options.variables is None:
        return _load(target, options)
    from slotstream_worker.weights.errors import BadWeights
    from slotstream_worker.weights.variables import with_variables

    # Of any target: what the model was made with only says names, shapes and dtypes.
    model = _load(target, replace(options, variables=None))
    try:
        return with_variables(model, options.variables)
    except BadWeights as error:
        raise BadTarget(str(error)) from error


def _load(target: str, options: TargetOptions) -> StreamModel:
    scheme, colon, rest = target.partition(":")
    if not (colon and scheme in SCHEMES):
        _check_options("a model MODULE:ATTRIBUTE", options, frozenset())
        return _from_module(target)
    if not rest:
        raise BadTarget(f"a model is {scheme}:{SCHEMES[scheme].rest}; got {target!r}")
    _check_options(f"a model {scheme}:{SCHEMES[scheme].rest}", options, SCHEMES[scheme].takes)
    return SCHEMES[scheme].load(rest, options)


def _check_options(called: str, options: TargetOptions, takes: frozenset[str]) -> None:
    """Raise `BadTarget` for an option that would change nothing."""
    if surplus := [name for name in options.given() if name not in takes]:
        raise BadTarget(
            f"{called} takes {_flags(sorted(takes)) or 'no options of its own'}, and "
            f"{_flags(surplus)} was given; leave it out"
        )


def _flags(names: list[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _from_nir(path: str, options: TargetOptions) -> StreamModel:
    """A graph in a `.nir` file."""
    try:
        from slotstream_worker.nir import nir
    except ModuleNotFoundError as error:
        if error.name != "h5py":
            raise
        raise BadTarget(
            "a model nir:FILE needs h5py, which is not installed; pip install 'slotstream[nir]'"
        ) from error
    if options.dtype == "float64":
        import jax

        jax.config.update("jax_enable_x64", True)
    given = options.given()
    if "max_model_bytes" in given:
        given["max_bytes"] = given.pop("max_model_bytes")
    return nir(path, **given)  # type: ignore[arg-type]


def _from_sparx(directory: str, options: TargetOptions) -> StreamModel:
    """The network of a run that sparx trained."""
    from slotstream_worker import sparx_runs

    try:
        return sparx_runs.load(directory, frame=options.frame or sparx_runs.FRAME)
    except sparx_runs.BadRun as error:
        raise BadTarget(str(error)) from error


SCHEMES: Mapping[str, Scheme] = {
    "nir": Scheme(
        "FILE",
        frozenset(("dt", "semantics", "reset", "discretise", "frame", "dtype", "max_model_bytes")),
        _from_nir,
    ),
    "sparx": Scheme("RUN", frozenset(("frame",)), _from_sparx),
}
"""Schemes by name. A Python module of such a name is reached through another that imports it."""


def _from_module(target: str) -> StreamModel:
    name, colon, attribute = target.partition(":")
    if not (name and colon and attribute) or name.startswith("."):
        schemes = ", ".join(f"{scheme}:{held.rest}" for scheme, held in SCHEMES.items())
        raise BadTarget(
            f"a model is MODULE:ATTRIBUTE, as in mymodels:gru, or {schemes}; got {target!r}"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        raise BadTarget(
            f"there is no module {error.name!r} (looked for {target!r} from {here}); "
            "is it installed, or on PYTHONPATH?"
        ) from error
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = ", ".join(n for n in vars(module) if not n.startswith("_"))[:200]
            raise BadTarget(f"module {name!r} has no {attribute!r}; it has {names}")
        found = getattr(found, part)
    if callable(found) and not isinstance(found, StreamModel):
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise BadTarget(
                f"{target} is called without arguments, and takes some: {error}"
            ) from error
    model = found() if callable(found) and not isinstance(found, StreamModel) else found
    if not isinstance(model, StreamModel):
        raise BadTarget(
            f"{target} gives a {type(model).__name__}, and a StreamModel is needed; "
            "slotstream_worker.models.linen and .carry make one"
        )
    return model
