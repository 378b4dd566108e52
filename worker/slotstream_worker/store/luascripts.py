"""The scripts of the slot table, each with the functions they share before it."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from slotstream.lines import Script

_FOLDER = files("slotstream_worker.store") / "scripts"


@cache
def script(name: str) -> Script:
    """The script of that name (`claim`, `commit`, `control`, `take`, `config`)."""
    text = (_FOLDER / f"{name}.lua").read_text()
    if name != "config":
        text = (_FOLDER / "common.lua").read_text() + text
    return Script(name, text)
