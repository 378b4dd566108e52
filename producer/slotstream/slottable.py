"""The slot table as a person reads it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from slotstream.app import App
from slotstream.names import Keys

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
    table = Table(title=f"{len(rows)} sessions of {app}", title_justify="left")
    for name, right in (
        ("session", False),
        ("status", False),
        ("owner", False),
        ("epoch", True),
        ("cursor", True),
        ("done", True),
        ("waiting", True),
        ("state", True),
        ("weights", False),
    ):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in rows[:limit]:
        table.add_row(
            row["session"],
            row["status"],
            row["owner"],
            row["epoch"],
            row["cursor"],
            row["done"],
            str(max(row["behind"], 0)),
            f"{row['state_bytes']:,} B",
            row["weights"],
        )
    console = Console()
    console.print(table)
    if len(rows) > limit:
        console.print(f"... and {len(rows) - limit} more; --limit shows them")
