"""What a run found: as tables for a person and as JSON for the next run."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Figure, Spread
from benchmarks.targets import TARGETS, Target

_PACKAGES = ("jax", "flax", "numpy", "redis", "hiredis", "sparxml")


@dataclass
class Report:
    """The figures of a run, what it left out and why, and what it ran on."""

    figures: list[Figure] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    quick: bool = False

    def save(self, path: Path) -> None:
        """Write the JSON; targets stand beside the figures that have one."""
        figures = []
        for figure in self.figures:
            target = TARGETS.get(figure.key)
            found = {"target": asdict(target), "met": target.met(figure)} if target else {}
            figures.append({**asdict(figure), **found})
        whole = {
            "machine": self.machine,
            "quick": self.quick,
            "skipped": self.skipped,
            "figures": figures,
        }
        path.write_text(json.dumps(whole, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read what `save` wrote."""
        whole = json.loads(path.read_text())
        figures = []
        for raw in whole["figures"]:
            raw = {k: v for k, v in raw.items() if k not in ("target", "met")}
            figures.append(Figure(**{**raw, "value": Spread(**raw["value"])}))
        return cls(figures, whole["skipped"], whole["machine"], whole["quick"])

    def show(self, console: Console) -> None:
        """Print the figures, what was left out, and the targets."""
        if (self.machine.get("load") or 0) > self.machine.get("cores", 1) / 2:
            console.print(
                f"others were at work here (load {self.machine['load']} on {self.machine['cores']} "
                "cores as the run began): expect wide spreads"
            )
        if self.figures:
            console.print(figures_table(self.figures))
        for figure in self.figures:
            if figure.note:
                console.print(f"{figure.a}: {figure.note}", style="dim", highlight=False)
        for what, reason in self.skipped.items():
            console.print(f"not measured: {what}: {reason}", highlight=False)
        found = [f for f in self.figures if f.key in TARGETS]
        if found:
            console.print(targets_table(found))


def machine() -> dict[str, Any]:
    """What the run is on, as far as it matters for the figures."""
    import jax

    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count()
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "cores": cores,
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "system": platform.system(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        **versions,
    }


def figures_table(figures: Iterable[Figure]) -> Table:
    """A figure a line."""
    table = Table(
        title="x: A's speed over B's; where less is better, A's cost over B's. Medians.",
        title_justify="left",
    )
    table.add_column("A")
    table.add_column("B")
    for name in ("A", "B", "figure", "quartiles", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("better")
    table.add_column("target")
    group = ""
    for figure in figures:
        if group and figure.key.split(".")[0] != group:
            table.add_section()
        group = figure.key.split(".")[0]
        target = TARGETS.get(figure.key)
        table.add_row(
            figure.a,
            figure.b,
            amount(figure.a_value, figure.of),
            amount(figure.b_value, figure.of),
            amount(figure.value.median, figure.unit),
            f"{bare(figure.value.low)} to {bare(figure.value.high)}",
            str(figure.value.count),
            figure.better,
            verdict(target, figure) if target else "",
        )
    return table


def targets_table(figures: Sequence[Figure]) -> Table:
    """The figures that have a target, and whether they reach it."""
    table = Table(title="targets", title_justify="left")
    table.add_column("figure")
    for name in ("target", "median", "quartiles"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("met")
    for figure in figures:
        target = TARGETS[figure.key]
        table.add_row(
            figure.a + (f" / {figure.b}" if figure.b else ""),
            limit(target),
            amount(figure.value.median, figure.unit),
            f"{bare(figure.value.low)} to {bare(figure.value.high)}",
            "[green]yes[/]" if target.met(figure) else "[red]no[/]",
        )
    return table


def verdict(target: Target, figure: Figure) -> str:
    """A target, in the colour of whether it is met."""
    colour = "green" if target.met(figure) else "red"
    return f"[{colour}]{limit(target)}[/]"


def limit(target: Target) -> str:
    """A target's limit, for a person."""
    return f"{'>=' if target.at == 'least' else '<='} {amount(target.limit, target.unit)}"


def counted(count: int, noun: str) -> str:
    """`1 row`, `1,000 rows`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def sessions_of(count: int) -> str:
    """`1 session`, `1,000 sessions`."""
    return counted(count, "session")


def amount(value: float | None, unit: str) -> str:
    """A value with its unit; empty for none."""
    if value is None:
        return ""
    short = {"us a frame": "us", "x": "x"}.get(unit, unit)
    return f"{bare(value)} {short}".strip()


def bare(value: float) -> str:
    """Three significant digits, thousands with commas."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.095 else f"{value:.3f}"
