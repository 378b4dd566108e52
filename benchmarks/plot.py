"""The picture of a run: one panel a measurement, medians with their quartiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.measure import Figure
from benchmarks.report import Report
from benchmarks.targets import TARGETS


@dataclass(frozen=True)
class Panel:
    """How a panel is drawn; `sides` draws A and B themselves instead of their ratio."""

    title: str
    x: str
    y: str
    log_x: bool = True
    log_y: bool = False
    sides: bool = False
    ticks: str = ""


PANELS = {
    "engine": Panel("engine: whole rounds", "sessions", "x the bare step's rows a second"),
    "server": Panel("StreamServer", "sessions", "x sparx's frames a second", log_y=True),
    "worker": Panel("worker through Redis", "sessions", "x the frames a second of", log_y=True),
    "latency": Panel("push to reply", "% of capacity", "ms", log_x=False, log_y=True, sides=True),
    "growth": Panel("64 active among many open", "sessions open", "x the cost of 64 open"),
    "payload": Panel(
        "larger frames", "bytes a frame", "x the cost of the smallest", log_y=True, ticks="bytes"
    ),
    "checkpoint": Panel("checkpoints", "seconds between them", "x the frames a second of none"),
    "startup": Panel("time to the first reply", "", "seconds"),
}
"""By the first word of a figure's panel; what follows it is added to the title."""


def draw(report: Report, path: Path) -> bool:
    """Draw the panels that the run has figures for; False where it has none."""
    found: dict[str, list[Figure]] = {}
    for one in report.figures:
        if one.panel:
            found.setdefault(one.panel, []).append(one)
    if not found:
        return False
    columns = min(len(found), 3 if len(found) > 4 else 2)
    rows = math.ceil(len(found) / columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(5.6 * columns, 4.2 * rows), layout="constrained", squeeze=False
    )
    for axes in grid.flat[len(found) :]:
        axes.set_visible(False)
    for axes, (name, figures) in zip(grid.flat, found.items(), strict=False):
        kind, _, more = name.partition(" ")
        (_bars if kind == "startup" else _lines)(axes, PANELS[kind], figures)
        axes.set_title(PANELS[kind].title + (f", {more}" if more else ""))
    quick = "quick run, " if report.quick else ""
    figure.suptitle(
        f"slotstream: {quick}{report.machine.get('cores')} cores, {report.machine.get('device')}; "
        "medians and quartiles",
        fontsize=11,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _lines(axes: Axes, panel: Panel, figures: list[Figure]) -> None:
    series: dict[str, list[Figure]] = {}
    for one in figures:
        series.setdefault(one.series, []).append(one)
    for k, (name, points) in enumerate(series.items()):
        points = sorted(points, key=lambda f: f.x or 0)
        if panel.sides:
            _sides(axes, points, name, f"C{k}")
        else:
            _ratios(axes, points, name, f"C{k}")
    if panel.log_x:
        axes.set_xscale("log")
    values = [v for f in figures for v in _shown(f, panel) if v is not None and math.isfinite(v)]
    if panel.log_y:
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 1.6, max(values) * 2.5)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, 1.35 * max(values))
    if not panel.sides:
        axes.axhline(1, color="0.6", lw=0.8, zorder=0)
    ticks = sorted({f.x for f in figures if f.x is not None})
    axes.set_xticks(ticks, [_tick(v, panel) for v in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel=panel.x, ylabel=panel.y)
    axes.grid(alpha=0.25)
    if any(f.key in TARGETS for f in figures) and not panel.sides:
        axes.plot([], [], "_", color="0.4", ms=12, mew=2, alpha=0.6, label="target")
    handles, _ = axes.get_legend_handles_labels()
    if len(handles) > 1:
        axes.legend(fontsize=7.5, framealpha=0.7, ncols=2 if len(handles) > 4 else 1)


def _ratios(axes: Axes, points: list[Figure], name: str, color: str) -> None:
    """Medians with their quartiles; a dash where a target stands."""
    middle = [p.value.median for p in points]
    spread = (
        [p.value.median - p.value.low for p in points],
        [p.value.high - p.value.median for p in points],
    )
    x = [p.x for p in points]
    axes.errorbar(
        x, middle, spread, fmt="o-", ms=4, capsize=3, lw=1.4, color=color, label=name or None
    )
    for point in points:
        if point.key in TARGETS:
            limit = TARGETS[point.key].limit
            axes.plot([point.x], [limit], "_", color=color, ms=16, mew=2, alpha=0.5)


def _sides(axes: Axes, points: list[Figure], name: str, color: str) -> None:
    """A itself, and B itself as a dashed line."""
    x = [p.x for p in points]
    axes.plot(x, [p.a_value for p in points], "o-", color=color, ms=4, label=name)
    label = f"{name}, {points[0].b}"
    b_values = [p.b_value for p in points]
    axes.plot(x, b_values, "o--", color=color, ms=3, lw=1, alpha=0.6, label=label)


def _shown(figure: Figure, panel: Panel) -> list[float | None]:
    if panel.sides:
        return [figure.a_value, figure.b_value]
    target = TARGETS.get(figure.key)
    return [figure.value.median, 1.0, target.limit if target else None]


def _bars(axes: Axes, panel: Panel, figures: list[Figure]) -> None:
    """Both sides of each figure, each once."""
    values: dict[str, float] = {}
    for one in figures:
        values.setdefault(one.b, one.b_value or 0.0)
        values.setdefault(one.a, one.a_value or 0.0)
    names = sorted(values, key=lambda name: values[name])
    drawn = axes.barh(range(len(names)), [values[n] for n in names], color="C0", height=0.35)
    axes.bar_label(drawn, fmt="%.1f s", padding=3, fontsize=8)
    for k, name in enumerate(names):
        axes.text(0.01 * max(values.values()), k + 0.24, name, fontsize=8)
    axes.margins(x=0.18)
    axes.set(xlabel=panel.y, yticks=[], ylim=(-0.5, len(names) - 0.3))


def _tick(value: float, panel: Panel) -> str:
    if panel.ticks == "bytes":
        return f"{value / 1024:g} KiB" if value >= 1024 else f"{value:g} B"
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"
