"""What came of a load: for people a table, for programs a mapping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from slotstream.bench.histogram import PRECISION, Histogram
from slotstream.bench.load import Load

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9}
_BUSY = 0.85
"""From this share of a core on, the tool itself may be what is slow."""


def latencies_ms(histogram: Histogram) -> dict[str, float | None]:
    """Percentiles and the longest, in milliseconds; None of nothing."""
    found = {name: histogram.percentile(percent) for name, percent in PERCENTILES.items()}
    found["max"] = histogram.max_s if histogram.count else math.nan
    return {name: None if math.isnan(value) else 1e3 * value for name, value in found.items()}


@dataclass(frozen=True)
class Outcome:
    """The figures of one load. Times in seconds or, where the name says so, milliseconds.

    Args:
        app: what was loaded.
        load: after its run.
        cpu_s: processor time that this process spent while frames were pushed.
        stopped_by: what ended it too early, if anything.
    """

    app: str
    load: Load
    cpu_s: float
    stopped_by: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every frame pushed has had its reply, once."""
        ledger = self.load.ledger
        return not (ledger.lost or ledger.duplicated or self.stopped_by)

    @property
    def pushing_s(self) -> float:
        """How long frames were pushed."""
        return max(self.load.stopped_at - self.load.started_at, 0.0)

    @property
    def busy(self) -> float:
        """Share of a core that this process used."""
        return self.cpu_s / self.pushing_s if self.pushing_s else 0.0

    def hz(self, count: int) -> float:
        """So many in the time of pushing, a second."""
        return count / self.pushing_s if self.pushing_s else 0.0

    def as_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        load, ledger, plan = self.load, self.load.ledger, self.load.plan
        return {
            "app": self.app,
            "sessions": plan.sessions,
            "rate_hz": plan.rate_hz,
            "duration_s": plan.duration_s,
            "window": plan.window,
            "seed": plan.seed,
            "ok": self.ok,
            "interrupted": load.interrupted,
            "stopped_by": self.stopped_by,
            "pushing_s": self.pushing_s,
            "pushed": ledger.pushed,
            "replies": ledger.replies,
            "lost": ledger.lost,
            "duplicated": ledger.duplicated,
            "errors": dict(ledger.errors),
            "ended_early": dict(ledger.ended_early),
            "behind": load.behind,
            "asked_hz": plan.asked_hz or None,
            "pushed_hz": self.hz(ledger.pushed),
            "answered_hz": self.hz(load.answered_in_time),
            "longest_gap_s": ledger.longest_gap_s,
            "latency_from_due_ms": latencies_ms(ledger.from_due) if plan.rate_hz else None,
            "latency_from_push_ms": latencies_ms(ledger.from_push),
            "latency_precision": PRECISION,
            "tool_cores": self.busy,
        }

    def show(self, console: Console) -> None:
        """Print the tables, and what there is to say about them."""
        load, plan = self.load, self.load.plan
        rate = f"{plan.rate_hz:g} frames a second each" if plan.rate_hz else "as fast as it goes"
        title = f"{plan.sessions:,} sessions of {self.app}, {rate}, {self.pushing_s:.1f} s"
        console.print(title, highlight=False)
        table = Table(show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        for name, value in self._rows():
            table.add_row(name, value)
        console.print(table)
        table = Table("latency, ms")
        for name in (*PERCENTILES, "max"):
            table.add_column(name, justify="right", no_wrap=True)
        kinds = {"from its push": load.ledger.from_push}
        if plan.rate_hz:
            kinds = {"from when it was due": load.ledger.from_due, **kinds}
        for kind, histogram in kinds.items():
            values = latencies_ms(histogram).values()
            table.add_row(kind, *("-" if v is None else f"{v:,.1f}" for v in values))
        console.print(table)
        for line in self.remarks():
            console.print(line, highlight=False, soft_wrap=True)

    def _rows(self) -> list[tuple[str, str]]:
        load, ledger = self.load, self.load.ledger
        rows = [
            ("frames pushed", f"{ledger.pushed:,}"),
            ("replies", f"{ledger.replies:,}"),
            ("lost", f"{ledger.lost:,}"),
            ("duplicated", f"{ledger.duplicated:,}"),
            ("error replies", f"{sum(ledger.errors.values()):,}"),
            *((f"  {code}", f"{count:,}") for code, count in sorted(ledger.errors.items())),
            *(
                (f"sessions that ended early, {reason}", f"{count:,}")
                for reason, count in sorted(ledger.ended_early.items())
            ),
        ]
        if load.plan.rate_hz:
            rows.append(("behind: due, and the window full", f"{load.behind:,}"))
            rows.append(("frames due a second", f"{load.plan.asked_hz:,.0f}"))
        return [
            *rows,
            ("frames pushed a second", f"{self.hz(ledger.pushed):,.0f}"),
            ("replies a second, while pushing", f"{self.hz(load.answered_in_time):,.0f}"),
            ("longest gap without a reply", f"{1e3 * ledger.longest_gap_s:,.0f} ms"),
            ("this tool, of a core", f"{100 * self.busy:.0f} %"),
        ]

    def remarks(self) -> list[str]:
        """What the figures mean, where that is not plain."""
        load, plan, ledger = self.load, self.load.plan, self.load.ledger
        found = [
            "A frame's latency counts from when it was due, also where it was pushed later since "
            "its session's window was full."
            if plan.rate_hz
            else "No rate was set: a frame is pushed when its session's window has room, so its "
            f"latency is that of a queue of {plan.window} (--window); --rate measures the "
            "latency under a load."
        ]
        if load.behind:
            found.append(
                f"The load is more than the deployment serves: {load.behind:,} frames were due "
                f"and not pushed, since {plan.window} of their sessions' were in flight; "
                f"{self.hz(load.answered_in_time):,.0f} of {plan.asked_hz:,.0f} frames a second "
                "were answered."
            )
        if self.busy > _BUSY:
            found.append(
                "This tool was busy nearly all the time and may itself be what is slow: run "
                "several, each with a part of the sessions."
            )
        if load.interrupted:
            found.append("It was stopped before its time.")
        if self.stopped_by:
            found.append(f"It was cut off: {self.stopped_by}")
        if ledger.lost:
            found.append(
                f"{ledger.lost:,} frames had no reply when nothing had come for "
                f"{plan.wait_s:g} s (--wait), or their sessions had ended."
            )
        return found
