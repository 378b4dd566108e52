"""The slot table as a person reads it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from slotstream.names import Keys

_FIELDS = ("status", "owner", "epoch", "cursor", "done", "count", "cuts", "weights", "opened")


def read_table(client: Any, keys: Keys) -> list[dict[str, Any]]:
    """Rows of the sessions that are not closed, by name, each with its entries that wait."""
    names = sorted(raw.decode() for raw in client.sscan_iter(keys.sessions, count=1000))
    rows = []
    for start in range(0, len(names), 256):
        part = names[start : start + 256]
        pipeline = client.pipeline(transaction=False)
        for name in part:
            pipeline.hmget(keys.row(name), _FIELDS)
            pipeline.xlen(keys.inbox(name))
            pipeline.hstrlen(keys.row(name), "state")
        answers = pipeline.execute()
        for k, name in enumerate(part):
            values, entries, state = answers[3 * k : 3 * k + 3]
            row: dict[str, Any] = {"session": name}
            row.update(
                (field, (value or b"").decode())
                for field, value in zip(_FIELDS, values, strict=True)
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
