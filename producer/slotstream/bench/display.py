"""A load as one watches it: how far it is, how fast, how late; a line or two on a terminal."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from slotstream.bench.load import Load

_REFRESH_HZ = 4.0
_RATE_OVER_S = 2.0
_SWITCH_S = 0.0005
"""The display draws in a thread; so it never holds the load up for longer."""

_BAR = 24


class Display:
    """Shows a load while it runs, where the console is a terminal; a context manager."""

    def __init__(self, console: Console, load: Load) -> None:
        self._load = load
        self._seen: deque[tuple[float, int, int]] = deque()
        self._live = Live(
            console=console,
            get_renderable=self.table,
            refresh_per_second=_REFRESH_HZ,
            transient=True,
        )
        self._shown = console.is_terminal
        self._switch_s = sys.getswitchinterval()

    def __enter__(self) -> Display:
        if self._shown:
            sys.setswitchinterval(_SWITCH_S)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            self._live.stop()
            sys.setswitchinterval(self._switch_s)

    def table(self) -> Table:
        """What is shown now."""
        load, ledger = self._load, self._load.ledger
        now = time.perf_counter()
        self._seen.append((now, ledger.pushed, ledger.replies))
        while now - self._seen[0][0] > _RATE_OVER_S:
            self._seen.popleft()
        then, pushed, replies = self._seen[0]
        over = max(now - then, 1e-9)
        latency = ledger.from_due if load.plan.rate_hz else ledger.from_push
        table = Table.grid(padding=(0, 2))
        table.add_row(
            _progress(load, now),
            f"pushed {(ledger.pushed - pushed) / over:,.0f}/s",
            f"replies {(ledger.replies - replies) / over:,.0f}/s",
            f"in flight {ledger.awaited:,}",
        )
        if latency.count:
            p50, p99 = (1e3 * latency.percentile(percent) for percent in (50, 99))
            longest = f"max {1e3 * latency.max_s:,.1f} ms"
            table.add_row("latency", f"p50 {p50:,.1f} ms", f"p99 {p99:,.1f} ms", longest)
        table.add_row(
            "",
            f"lost {ledger.lost:,}",
            f"duplicated {ledger.duplicated:,}",
            f"errors {sum(ledger.errors.values()):,}",
        )
        return table


def _progress(load: Load, now: float) -> str:
    if load.state == "opening":
        return f"opening: {load.opened:,} of {load.plan.sessions:,} sessions"
    if load.state != "pushing":
        return f"waiting for {load.ledger.awaited:,} replies"
    share = min((now - load.started_at) / load.plan.duration_s, 1.0)
    done = round(share * _BAR)
    return f"{'━' * done}{'╌' * (_BAR - done)} {share * load.plan.duration_s:.0f} s"
