"""The table: for a person, and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

COLUMNS = ("family", "model", "adapter", "state a session", "served", "largest difference")
BEGIN, END = "<!-- the table: make compat -->", "<!-- end of the table -->"
_WORDS = {
    "bitwise": "yes, its bits",
    "rounding": "yes, to rounding",
    "differs": "IT DIFFERS",
    "refused": "refused",
    "failed": "FAILED",
    "missing": "not run",
}


def rows(families: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row a case, by `COLUMNS`."""
    found = []
    for family in families:
        versions = family.get("versions", {})
        name = family.get("name", family["package"])
        package = " ".join(filter(None, (name, versions.get(family["package"]))))
        for one in family["results"]:
            state = f"{one['state_bytes']:,} bytes: {one['state']}" if one.get("state") else ""
            found.append((package, one["case"], one.get("adapter", ""), state, *_seen(one)))
    return found


def _seen(one: dict[str, Any]) -> tuple[str, str]:
    word = _WORDS[one["verdict"]]
    if one["verdict"] in ("refused", "failed", "missing"):
        return word, shortened(one["reason"])
    difference = f"{one['difference']:.2g} of {one['scale']:.3g}"
    company = "" if one["company"] else "; ITS BITS DEPEND ON COMPANY"
    rows = ",".join(map(str, one.get("rows", ()))) or "4"
    launches = "" if rows == "4" else f"; in launches of {rows} rows"
    if one["verdict"] == "bitwise":
        difference = f"0 of {one['scale']:.3g}"
    return word, difference + launches + company


def shortened(reason: str, most: int = 220) -> str:
    """A reason in one line."""
    line = re.sub(r"\s+", " ", reason).strip()
    return line if len(line) <= most else line[: most - 1] + "…"


def table(families: Iterable[dict[str, Any]]) -> Table:
    """The table as the terminal shows it."""
    shown = Table(title="served in company, against the package's own call over the whole stream")
    for column in COLUMNS:
        shown.add_column(column, overflow="fold")
    for row in rows(families):
        shown.add_row(*map(escape, row))
    return shown


def markdown(families: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows(families)
    ]
    return "\n".join(lines)


def write(path: Path, families: list[dict[str, Any]]) -> None:
    """Put the table between its two marks in a Markdown file."""
    text = path.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{path} has no line {BEGIN} with a line {END} after it")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n\n{markdown(families)}\n\n{END}{after}")
