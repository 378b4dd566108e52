"""`slotstream check`: what the probe found, for a person."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from slotstream_worker.engine.engine import Engine
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.engine.probe import Probe, candidates


def report(
    model: StreamModel, slots: int, row_counts: tuple[int, ...] | None, console: Console
) -> None:
    """Measure a model and print what it takes, gives and holds, and how it would be launched."""
    console.print(_takes(model))
    engine = Engine(model, slots)
    counts = list(row_counts or candidates(slots))
    with Progress(
        TextColumn("measuring {task.fields[rows]} rows a launch"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=len(counts), rows=0)

        def step(count: int) -> None:
            bar.update(task, rows=count, completed=counts.index(count))

        probed = engine.prepare(counts, progress=step)
    console.print(_launches(probed))
    chosen = ", ".join(map(str, probed.row_counts))
    console.print(
        f"[green]yes[/]: it can be served, in launches of {chosen} rows. A round of all "
        f"{slots} sessions takes about {probed.cover.cost(slots):.2f} ms.",
        highlight=False,
    )


def _takes(model: StreamModel) -> Table:
    table = Table(title=model.name, title_justify="left", show_header=False)
    table.add_column()
    table.add_column()
    table.add_row("frame", f"{model.dtype.name} {list(model.frame_shape)}")
    for output in model.outputs:
        table.add_row(f"output {output.name}", f"{output.dtype.name} {list(output.shape)}")
    for leaf in model.spec.leaves:
        table.add_row(
            f"state {leaf.path}", f"{leaf.dtype.name} {list(leaf.shape)}, batch axis {leaf.axis}"
        )
    table.add_row("state a slot", f"{model.spec.row_bytes:,} bytes")
    if model.spec.row_bytes:
        table.add_row("slots a GiB", f"{2**30 // model.spec.row_bytes:,}")
    table.add_row("weights", model.weights)
    return table


def _launches(probed: Probe) -> Table:
    table = Table(title="launches", title_justify="left")
    for name in ("rows", "ms", "µs a row"):
        table.add_column(name, justify="right")
    table.add_column("agrees bit for bit with")
    table.add_column("used")
    for one in probed.measured:
        same = [
            str(m.count)
            for m in probed.measured
            if m.steady and m.digest == one.digest and m.count != one.count
        ]
        agrees = ", ".join(same) or "none other"
        table.add_row(
            str(one.count),
            f"{one.ms:.3f}",
            f"{1e3 * one.ms / one.count:.1f}",
            agrees if one.steady else "[red]not even itself: rows depend on company[/]",
            "yes" if one.count in probed.row_counts else "",
        )
    return table
