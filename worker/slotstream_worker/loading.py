"""Finding the model that `--model MODULE:ATTRIBUTE` (or `sparx:RUN`) names."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

from slotstream_worker import sparx_runs
from slotstream_worker.engine.model import StreamModel


class BadTarget(ValueError):
    """`--model` names nothing that can be served; says what was looked for and what was found."""


def load(target: str) -> StreamModel:
    """Import `MODULE:ATTRIBUTE`, call it, and return the `StreamModel` it gives; or `sparx:RUN`'s.

    A module that does not exist is told apart from one that fails while it is imported: the
    latter's own error is raised.

    Raises:
        BadTarget: there is no such module or attribute, or it gives something else.
    """
    # A scheme of its own: the run that a training left (see `sparx_runs`).
    if target.startswith(f"{sparx_runs.SCHEME}:") and target != f"{sparx_runs.SCHEME}:":
        try:
            return sparx_runs.load(target.partition(":")[2])
        except sparx_runs.BadRun as error:
            raise BadTarget(str(error)) from error
    name, colon, attribute = target.partition(":")
    if not (name and colon and attribute) or name.startswith("."):
        raise BadTarget(f"a model is MODULE:ATTRIBUTE, as in mymodels:gru; got {target!r}")
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
