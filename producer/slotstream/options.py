"""Options that several commands take."""

from __future__ import annotations

import click

redis_option = click.option(
    "--redis",
    "url",
    envvar="SLOTSTREAM_REDIS",
    show_envvar=True,
    default="redis://localhost:6379/0",
    show_default=True,
    help="URL of the Redis server.",
)
app_option = click.option(
    "--app",
    envvar="SLOTSTREAM_APP",
    show_envvar=True,
    default="slotstream",
    show_default=True,
    help="Name of the app; the prefix of all its keys.",
)
