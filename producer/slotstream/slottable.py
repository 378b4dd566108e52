"""The slot table as a person reads it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from slotstream.app import App
from slotstream.names import Keys

_WIDE = 160
_FIELDS = ("status", "owner", "epoch", "cursor", "done", "count", "cuts", "weights", "opened")


def read_table(app: App) -> list[dict[str, Any]]:
    """Rows of the sessions that are not closed, by name, each with its entries that wait."""
    rows = []
    for keys in app.partitions():
        names = sorted(raw.decode() for raw in app.link.call("SMEMBERS", keys.sessions))
        for start in range(0, len(names), 256):
            rows += _read_rows(app, keys, names[start : start + 256])
    return sorted(rows, key=lambda row: str(row["session"]))


def _read_rows(app: App, keys: Keys, names: list[str]) -> list[dict[str, Any]]:
    commands: list[tuple[str, ...]] = []
    for name in names:
        commands += [
            ("HMGET", keys.row(name), *_FIELDS),
            ("XLEN", keys.inbox(name)),
            ("HSTRLEN", keys.row(name), "state"),
        ]
    answers = app.link.calls(commands)
    rows = []
    for k, name in enumerate(names):
        values, entries, state = answers[3 * k : 3 * k + 3]
        row: dict[str, Any] = {"session": name, "partition": keys.partition}
        row.update(
            (field, (value or b"").decode()) for field, value in zip(_FIELDS, values, strict=True)
        )
        row["behind"] = entries - int(row["count"] or 0)
        row["state_bytes"] = state
        rows.append(row)
    return rows


def show_table(rows: list[dict[str, Any]], app: str, limit: int) -> None:
    """Print the rows as a table."""
    console = Console()
    wide = console.width >= _WIDE or not console.is_terminal
    if not console.is_terminal:
        console = Console(width=_WIDE)  # whoever reads a pipe has no edge to wrap at
    table = Table(title=f"{len(rows)} sessions of {app}", title_justify="left")
    table.add_column("session", min_width=12, overflow="ellipsis", no_wrap=True)
    table.add_column("status", min_width=7, no_wrap=True)
    table.add_column("owner", min_width=8, overflow="ellipsis", no_wrap=True)
    for name in ("epoch", "cursor", "done") if wide else ():
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("waiting", "state"):
        table.add_column(name, justify="right", min_width=7, no_wrap=True)
    for name in ("weights",) if wide else ():
        table.add_column(name, no_wrap=True)
    for row in rows[:limit]:
        middle = (row["epoch"], row["cursor"], row["done"]) if wide else ()
        table.add_row(
            *(row["session"], row["status"], row["owner"], *middle),
            *(str(max(row["behind"], 0)), f"{row['state_bytes']:,} B"),
            *((row["weights"],) if wide else ()),
        )
    console.print(table)
    if len(rows) > limit:
        console.print(f"... and {len(rows) - limit} more; --limit shows them")
