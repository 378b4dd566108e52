"""`make compat`: makes the environments, runs every family in its own, prints the table.

python -m compat [--only FAMILY]... [--write]

Exits with 1 where a model that was served differs from its package. What cannot be installed or
served is a line of the table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from compat import report
from compat.environments import ENVIRONMENTS, KEPT, ROOT, Environment, NotInstalled, make

LIMIT_S = 1200
PAGE = ROOT / "docs" / "compatibility.md"
FAMILIES = [family for environment in ENVIRONMENTS for family in environment.families]


@click.command()
@click.option("--only", type=click.Choice(FAMILIES), multiple=True, help="These families only.")
@click.option("--write", is_flag=True, help=f"Put the table into {PAGE.relative_to(ROOT)}.")
def main(only: tuple[str, ...], write: bool) -> None:
    """Serve models of packages from PyPI, and compare them with the packages' own calls."""
    console, families, known = Console(), [], {}
    for environment in ENVIRONMENTS:
        for family in environment.families:
            if only and family not in only:
                continue
            console.print(f"{family}: in .compat/{environment.name}", highlight=False)
            families.append(run(environment, family))
            known = remember(families[-1])
    if not console.is_terminal:
        console.width = 160  # of a log, which has no width of its own
    console.print(report.table(families))
    if write:
        report.write(PAGE, [known[name] for name in FAMILIES if name in known])
    verdicts = [one["verdict"] for family in families for one in family["results"]]
    sys.exit(1 if "differs" in verdicts else 0)


def remember(family: dict[str, Any]) -> dict[str, Any]:
    """Keep a family's results beside those of the others, and return all of them."""
    kept = KEPT / "results.json"
    known = json.loads(kept.read_text()) if kept.exists() else {}
    known[family["family"]] = family
    kept.write_text(json.dumps(known, indent=1))
    return dict(known)


def run(environment: Environment, family: str) -> dict[str, Any]:
    """Results of one family; where it could not be run, one result that says why."""
    KEPT.mkdir(exist_ok=True)
    try:
        python = make(environment)
    except NotInstalled as error:
        return _missing(environment, family, f"could not be installed: {error}")
    return measure(python, family) or _missing(environment, family, "it did not finish")


def measure(python: Path, family: str) -> dict[str, Any] | None:
    """Run `compat.one` with that Python; None where it gave nothing."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [str(python), "-m", "compat.one", family]
    try:
        ran = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if ran.returncode:
        return None
    return {"family": family, **json.loads(ran.stdout.splitlines()[-1])}


def _missing(environment: Environment, family: str, reason: str) -> dict[str, Any]:
    package = environment.requirements[0].partition("[")[0]
    result = {"case": "all", "verdict": "missing", "reason": reason}
    return {"family": family, "package": package, "results": [result]}


if __name__ == "__main__":
    main()
