"""`make bench`: ratios, as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.engine import engine, occupancy
from benchmarks.memory import memory
from benchmarks.wire import wire

ALL = {"occupancy": occupancy, "engine": engine, "wire": wire}


@click.command()
@click.option(
    "--only", type=click.Choice([*sorted(ALL), "memory"]), multiple=True, help="Measure these only."
)
@click.option(
    "--json",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the figures here too.",
)
def main(only: tuple[str, ...], path: Path | None) -> None:
    """Measure, and print a ratio a line."""
    console, results = Console(), []
    table = Table(title="ratios: the median of A/B, measured in turn", title_justify="left")
    for name in ("benchmark", "A", "B"):
        table.add_column(name)
    for name in ("A, ms", "B, ms", "A/B", "quartiles"):
        table.add_column(name, justify="right")
    for name in [name for name in only or ALL if name in ALL]:
        with console.status(f"measuring {name}"):
            for one in ALL[name]():
                results.append(one.as_dict())
                table.add_row(
                    one.name,
                    one.a,
                    one.b,
                    f"{one.a_ms:.4f}",
                    f"{one.b_ms:.4f}",
                    f"{one.ratio:.3f}",
                    f"{one.low:.3f} to {one.high:.3f}",
                )
    if results:
        console.print(table)
    if not only or "memory" in only:
        results += memory(console)
    if path:
        path.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
