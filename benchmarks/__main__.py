"""`make bench`: everything measured in turn, as a table, as JSON and as a picture.

python -m benchmarks --only worker --quick
python -m benchmarks compare old.json new.json
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path

import click
from rich.console import Console

from benchmarks.compare import compare as compared
from benchmarks.measure import Figure, Run
from benchmarks.model import load_peers
from benchmarks.report import Report, machine

MEASUREMENTS = {
    "engine": "benchmarks.engine",
    "occupancy": "benchmarks.engine",
    "server": "benchmarks.server",
    "worker": "benchmarks.worker",
    "latency": "benchmarks.latency",
    "waiting": "benchmarks.waiting",
    "growth": "benchmarks.growth",
    "payload": "benchmarks.growth",
    "idle": "benchmarks.idle",
    "memory": "benchmarks.memory",
    "checkpoint": "benchmarks.checkpoint",
    "startup": "benchmarks.startup",
    "stall": "benchmarks.weights",
    "transfer": "benchmarks.weights",
}
"""Name of each measurement, and the module that has a function of that name."""
RESULTS = Path("bench-results")
FILE = click.Path(dir_okay=False, path_type=Path)


def wide_console() -> Console:
    """A console on which a line of a table is a line, where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=180)


def collect(
    run: Run, measurements: Mapping[str, Callable[[Run], Iterator[Figure]]], console: Console
) -> Report:
    """Run the measurements; one that fails is noted with its reason, and the others go on."""
    load_peers()
    report = Report(skipped=run.skipped, machine=machine(), quick=run.quick)
    with run.progress, run.task("measurements", len(measurements)) as advance:
        for name, measurement in measurements.items():
            try:
                report.figures.extend(measurement(run))
            except KeyboardInterrupt:
                run.skip(name, "interrupted")
                break
            except Exception as error:
                console.print_exception()
                run.skip(name, f"failed: {type(error).__name__}: {error}")
            advance()
    return report


@click.group(invoke_without_command=True)
@click.option("--only", type=click.Choice(list(MEASUREMENTS)), multiple=True,
              help="Measure these only; may be given several times.")  # fmt: skip
@click.option("--quick", is_flag=True, help="Small sizes, few repetitions: to see that all works.")
@click.option("--repeats", type=click.IntRange(0), default=0,
              help="Repetitions of each measurement; 7 by default, 3 of a quick run.")  # fmt: skip
@click.option("--json", "json_path", type=FILE, default=RESULTS / "bench.json", show_default=True,
              help="Where the figures go.")  # fmt: skip
@click.option("--png", "png_path", type=FILE, default=RESULTS / "bench.png", show_default=True,
              help="Where the picture goes.")  # fmt: skip
@click.pass_context
def main(
    context: click.Context,
    only: tuple[str, ...],
    quick: bool,
    repeats: int,
    json_path: Path,
    png_path: Path,
) -> None:
    """Measure ratios of two things in one run; `compare` puts two runs side by side."""
    if context.invoked_subcommand:
        return
    console = wide_console()
    run = Run(quick=quick, repeats=repeats, console=console if console.is_terminal else None)
    chosen = {
        name: getattr(import_module(module), name)
        for name, module in MEASUREMENTS.items()
        if not only or name in only
    }
    report = collect(run, chosen, console)
    report.show(console)
    finish(report, json_path, png_path, console)
    if any(reason.startswith("failed") for reason in report.skipped.values()):
        raise SystemExit(1)


def finish(report: Report, json_path: Path, png_path: Path, console: Console) -> None:
    """Write the JSON and the picture."""
    for path in (json_path, png_path):
        path.parent.mkdir(parents=True, exist_ok=True)
    report.save(json_path)
    console.print(f"figures in {json_path}")
    try:
        from benchmarks.plot import draw
    except ImportError:
        console.print("no picture: matplotlib is not installed")
        return
    if draw(report, png_path):
        console.print(f"picture in {png_path}")


@main.command()
@click.argument("old", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("new", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def compare(old: Path, new: Path) -> None:
    """Compare the JSON of two runs: medians, change, and whether the quartiles are apart."""
    wide_console().print(compared(Report.load(old), Report.load(new)))


if __name__ == "__main__":
    main()
