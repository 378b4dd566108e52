"""The versions and the workers' progress with them, as a person reads it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from slotstream_worker.weights.catalogue import Catalogue

_WIDE = 160


def read_status(catalogue: Catalogue) -> dict[str, Any]:
    """Versions, what is current, and each worker's report (without what only peers may know)."""
    state = catalogue.state()
    versions = [
        {
            "version": entry.version,
            "status": entry.status,
            "current": entry.version == state.current,
            "candidate": entry.version == state.candidate,
            "bytes": entry.nbytes,
            "ranks": entry.ranks,
            "on_weights": entry.on_weights,
            "created": _moment(entry.created_ms),
            "reason": entry.reason,
            "leases": catalogue.leases(entry.version),
            "workers": catalogue.said(entry.version),
        }
        for entry in catalogue.entries()
    ]
    workers = {
        name: {key: value for key, value in report.items() if key != "token"}
        for name, report in sorted(catalogue.reports().items())
    }
    return {"current": state.current, "candidate": state.candidate,
            "on_weights": state.on_weights, "versions": versions, "workers": workers}  # fmt: skip


def show_status(found: dict[str, Any], app: str) -> None:
    """Print it as tables."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    console.print(_versions(found, app))
    console.print(_workers(found))
    console.print(_updates(found))


def _versions(found: dict[str, Any], app: str) -> Table:
    current = found["current"] or "what the workers were started with"
    table = Table(title=f"weights of {app}; current: {current}", title_justify="left")
    for name in ("version", "status", "since"):
        table.add_column(name, no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("sessions", justify="right")
    table.add_column("held by", justify="right")
    table.add_column("reason")
    used: dict[str, int] = {}
    for report in found["workers"].values():
        for version, count in report["resident"].items():
            used[version] = used.get(version, 0) + count
    for one in found["versions"]:
        mark = " (current)" if one["current"] else " (at once)" if one["candidate"] else ""
        table.add_row(
            one["version"], one["status"] + mark, one["created"], f"{one['bytes']:,}",
            f"{used.get(one['version'], 0):,}", f"{len(one['leases'])}", one["reason"],
        )  # fmt: skip
    return table


def _workers(found: dict[str, Any]) -> Table:
    table = Table(title=f"{len(found['workers'])} workers", title_justify="left")
    for name in ("worker", "current", "coming", "resident: sessions"):
        table.add_column(name, overflow="fold")
    for name in ("staging", "plans hit/refresh/miss"):
        table.add_column(name, justify="right")
    table.add_column("serves others", overflow="fold")
    for name, report in found["workers"].items():
        resident = ", ".join(f"{v}: {n}" for v, n in report["resident"].items())
        plans = "/".join(str(report["plans"].get(k, 0)) for k in ("hit", "refresh", "miss"))
        serves = f"{report['serves']}, {report['served_bytes']:,} B" if report["serves"] else "no"
        table.add_row(name, report["current"], report["coming"] or "-", resident,
                      f"{report['staging_bytes']:,}", plans, serves)  # fmt: skip
    return table


def _updates(found: dict[str, Any]) -> Table:
    table = Table(title="updates", title_justify="left")
    for name in ("worker", "version", "state", "plan", "bytes by transport", "seconds by phase",
                 "reason"):  # fmt: skip
        table.add_column(name, overflow="fold")
    for name, report in found["workers"].items():
        for update in report["updates"]:
            moved = ", ".join(f"{k} {v:,}" for k, v in update["moved"].items())
            seconds = ", ".join(f"{k} {v:.3f}" for k, v in update["seconds"].items())
            table.add_row(name, update["version"], update["state"], update["plan"], moved,
                          seconds, update["reason"])  # fmt: skip
    return table


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds") if ms else ""
