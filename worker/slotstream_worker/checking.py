"""`slotstream check`: what the probe found, for a person."""

from __future__ import annotations

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from slotstream_worker.engine.capacity import memory_bytes, nbytes, sessions
from slotstream_worker.engine.comparison import Comparison, compare
from slotstream_worker.engine.engine import Engine
from slotstream_worker.engine.errors import CannotStream
from slotstream_worker.engine.model import StreamModel
from slotstream_worker.engine.probe import Probe, candidates


def report(
    model: StreamModel, slots: int, row_counts: tuple[int, ...] | None, console: Console
) -> None:
    """Measure a model and print what it takes, gives and holds, and how it would be launched.

    Raises:
        CannotStream: it cannot be served, with the reason.
    """
    console.print(_takes(model))
    engine = Engine(model, slots)
    counts = list(row_counts or candidates(slots))
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("measuring", total=len(counts))

        def step(count: int) -> None:
            what = f"measuring {count} rows a launch"
            bar.update(task, description=what, completed=counts.index(count))

        probed = engine.prepare(counts, progress=step)
        bar.remove_task(task)
        task = bar.add_task("comparing", total=None)
        compared = compare(
            engine, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    console.print(_launches(probed))
    console.print(_compared(compared))
    company, _ = compared
    if not company.bitwise:
        raise CannotStream(
            f"{model.name} cannot be served: served in random company its outputs are other bits "
            f"than alone (largest difference {company.largest:.3g}); please report this, since the "
            "row counts were seen to agree"
        )
    chosen = ", ".join(map(str, probed.row_counts))
    console.print(
        f"[green]yes[/]: it can be served, in launches of {chosen} rows. A round of all "
        f"{slots} sessions takes about {probed.cover.cost(slots):.2f} ms.{_room(engine)}",
        highlight=False,
    )


def _room(engine: Engine) -> str:
    """How many sessions the device holds, in a sentence."""
    if not engine.model.spec.row_bytes:
        return " It has no state, so any number of sessions fits."
    memory = memory_bytes()
    device = jax.local_devices()[0]
    kind = "free memory of this host" if device.platform == "cpu" else device.device_kind
    return (
        f" The {kind} ({memory / 2**30:.1f} GiB) holds the state of about "
        f"{sessions(engine, memory):,} sessions."
    )


def _compared(compared: tuple[Comparison, ...]) -> Table:
    table = Table(title="outputs on random streams", title_justify="left")
    table.add_column("served")
    table.add_column("against")
    for name in ("difference", "values to", "other bits"):
        table.add_column(name, justify="right")
    for one in compared:
        table.add_row(
            one.what,
            one.against,
            "none" if one.bitwise else f"{one.largest:.3g}",
            f"{one.scale:.3g}",
            "none" if one.bitwise else f"{one.unequal:.2%}",
        )
    return table


def _takes(model: StreamModel) -> Table:
    table = Table(title=model.name, title_justify="left", show_header=False)
    table.add_column()
    table.add_column()
    if not model.inputs:
        table.add_row("frame", f"{model.dtype.name} {list(model.frame_shape)}")
    for one in model.inputs:
        table.add_row(f"input {one.name}", f"{one.dtype.name} {[model.frame, *one.shape]}")
    for output in model.outputs:
        table.add_row(f"output {output.name}", f"{output.dtype.name} {list(output.shape)}")
    for leaf in model.spec.leaves:
        table.add_row(
            f"state {leaf.path}", f"{leaf.dtype.name} {list(leaf.shape)}, batch axis {leaf.axis}"
        )
    table.add_row("state a slot", f"{model.spec.row_bytes:,} bytes")
    if model.spec.row_bytes:
        table.add_row("slots a GiB", f"{2**30 // model.spec.row_bytes:,}")
    table.add_row("weights", f"{model.weights}, {nbytes(model.variables):,} bytes")
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
