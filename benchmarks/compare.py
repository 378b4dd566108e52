"""Two runs side by side: what changed, and whether by more than either of them spreads."""

from __future__ import annotations

from rich.table import Table

from benchmarks.measure import Figure
from benchmarks.report import Report, amount, bare


def change(old: Figure, new: Figure) -> float:
    """Relative change of the median; 0.1 for a tenth more."""
    return new.value.median / old.value.median - 1 if old.value.median else float("nan")


def word(old: Figure, new: Figure) -> str:
    """`better` or `worse` where the quartiles of the two do not overlap, else `within`."""
    if not old.value.apart(new.value):
        return "within"
    more = new.value.median > old.value.median
    return "better" if more == (new.better == "more") else "worse"


def compare(old: Report, new: Report) -> Table:
    """A table of the figures that both have; the others are counted in its caption."""
    before = {figure.key: figure for figure in old.figures}
    after = {figure.key: figure for figure in new.figures}
    table = Table(
        title="medians, and quartiles; within: the quartiles overlap", title_justify="left"
    )
    table.add_column("figure")
    for name in ("old", "new", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outside the spread")
    colours = {"better": "green", "worse": "red", "within": "dim"}
    for key, now in after.items():
        if key not in before:
            continue
        was = before[key]
        found = word(was, now)
        table.add_row(
            now.a + (f" / {now.b}" if now.b else ""),
            _spread(was),
            _spread(now),
            f"{100 * change(was, now):+.1f} %",
            f"[{colours[found]}]{found}[/]",
        )
    alone = len(before.keys() ^ after.keys())
    notes = [f"{alone} figures are in one of the two only"] if alone else []
    notes += [
        f"{name}: {old.machine.get(name)} then, {new.machine.get(name)} now"
        for name in sorted({*old.machine, *new.machine})
        if name != "load" and old.machine.get(name) != new.machine.get(name)
    ]
    if old.quick or new.quick:
        notes.append("a quick run is among them: its figures are for seeing that all works")
    if notes:
        table.caption, table.caption_justify = "; ".join(notes), "left"
    return table


def _spread(figure: Figure) -> str:
    value = figure.value
    return f"{amount(value.median, figure.unit)} ({bare(value.low)} to {bare(value.high)})"
