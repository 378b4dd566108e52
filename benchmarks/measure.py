"""The instrument: things measured in turn (A B A B ...), and what is said of them.

    times = run.alternate("engine", {"round": clock(round_, 1024), "bare": clock(bare, 256)})
    yield faster(times, "round", "bare", key="engine.1024", a="a round of 1,024", b="the bare step")

A machine that is shared makes absolute times mean little, so everything is put against something
that ran in the same seconds. A ratio is formed within each repetition, and the median and the
quartiles are those of the ratios. Repetitions after the first start where the others are warm:
each thing is run once, untimed, before any is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")
Thing = Callable[[], float]
"""Measures one thing once: seconds a unit of its work."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `count` values."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of some values, at least one."""
        array = np.asarray(list(values), float)
        low, median, high = np.percentile(array, [25, 50, 75])
        return cls(float(median), float(low), float(high), len(array))

    def apart(self, other: Spread) -> bool:
        """Whether the quartiles of the two do not overlap."""
        return self.low > other.high or other.low > self.high


@dataclass(frozen=True)
class Figure:
    """One figure: A against B, or A alone.

    Attributes:
        key: what targets and comparisons know it by; unique in a run.
        a: what was measured.
        b: what it was measured against; empty for a figure of A alone.
        value: the figure.
        unit: `x` for a ratio, else `ms`, `s`, `%`, `B`.
        better: whether `more` or `less` of it is better.
        a_value, b_value: medians of the two by themselves, in `of`; for orientation only.
        panel, series, x: where it stands in the plot.
        note: what a reader should know, such as a rate that was not sustained.
    """

    key: str
    a: str
    b: str
    value: Spread
    unit: Literal["x", "ms", "s", "%", "B"] = "x"
    better: Literal["more", "less"] = "more"
    a_value: float | None = None
    b_value: float | None = None
    of: str = ""
    panel: str = ""
    series: str = ""
    x: float | None = None
    note: str = ""

    def at(self, panel: str, series: str, x: float) -> Figure:
        """The same figure, with its place in the plot."""
        return replace(self, panel=panel, series=series, x=x)

    def in_seconds(self) -> Figure:
        """The same figure, the two by themselves in seconds."""
        a, b = self.a_value or 0.0, self.b_value or 0.0
        return replace(self, a_value=a / 1e6, b_value=b / 1e6, of="s")


Times = Mapping[str, np.ndarray[Any, Any]]
"""Seconds a unit of each thing, one value a repetition."""


def faster(times: Times, of: str, than: str, *, key: str, a: str, b: str) -> Figure:
    """How many times as fast the thing `of` is as the thing `than`; more is better."""
    return Figure(
        key, a, b, Spread.of(times[than] / times[of]), **_sides(times, of, than), better="more"
    )


def dearer(times: Times, of: str, than: str, *, key: str, a: str, b: str) -> Figure:
    """How many times as much the thing `of` takes as the thing `than`; less is better."""
    return Figure(
        key, a, b, Spread.of(times[of] / times[than]), **_sides(times, of, than), better="less"
    )


def larger(
    mine: np.ndarray[Any, Any],
    theirs: np.ndarray[Any, Any],
    *,
    key: str,
    a: str,
    b: str,
    of: str,
    note: str = "",
) -> Figure:
    """How many times as large `mine` is as `theirs`, in a unit `of` their own; less is better."""
    sides = {"a_value": float(np.median(mine)), "b_value": float(np.median(theirs)), "of": of}
    return Figure(key, a, b, Spread.of(mine / theirs), **sides, better="less", note=note)


def _sides(times: Times, of: str, than: str) -> dict[str, Any]:
    return {
        "a_value": 1e6 * float(np.median(times[of])),
        "b_value": 1e6 * float(np.median(times[than])),
        "of": "us a frame",
    }


def clock(act: Callable[[], Any], units: int, *, least_s: float = 0.1) -> Thing:
    """A thing that calls `act` as often as `least_s` takes; `act` does `units` units of work."""

    def measure() -> float:
        calls, start = 0, time.perf_counter()
        while True:
            act()
            calls += 1
            passed = time.perf_counter() - start
            if passed >= least_s:
                return passed / (calls * units)

    return measure


class Run:
    """One run of the benchmarks: how long to measure, what was left out and why.

    Args:
        quick: small sizes and few repetitions, to see that everything works.
        repeats: repetitions of each measurement; 7 by default, 3 of a quick run.
        console: where the progress bars go.
    """

    def __init__(self, *, quick: bool, repeats: int = 0, console: Console | None = None) -> None:
        self.quick = quick
        self.repeats = repeats or (3 if quick else 7)
        self.skipped: dict[str, str] = {}
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console or Console(stderr=True),
            transient=True,
        )

    def pick(self, full: T, quick: T) -> T:
        """A setting of the whole run, or that of a quick one."""
        return quick if self.quick else full

    def skip(self, what: str, reason: str) -> None:
        """Say what was not measured, and why."""
        self.skipped[what] = reason

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Callable[[], None]]:
        """A progress bar of `total` steps; gives what is called after each."""
        task = self.progress.add_task(label, total=total)
        try:
            yield lambda: self.progress.advance(task)
        finally:
            self.progress.remove_task(task)

    def alternate(self, label: str, things: Mapping[str, Thing], *, repeats: int = 0) -> Times:
        """Measure all things in turn, repetition after repetition, after one round untimed."""
        repeats = repeats or self.repeats
        values: dict[str, list[float]] = {name: [] for name in things}
        with self.task(label, (repeats + 1) * len(things)) as advance:
            for repetition in range(repeats + 1):
                for name, thing in things.items():
                    taken = thing()
                    if repetition:
                        values[name].append(taken)
                    advance()
        return {name: np.asarray(taken) for name, taken in values.items()}
