"""Command-line options that are environment variables too, and their types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def option(name: str, **kwargs: Any) -> Decorator:
    """An option `--a-b` that is also the environment variable `SLOTSTREAM_A_B`."""
    env = "SLOTSTREAM_" + name.removeprefix("--").upper().replace("-", "_")
    made: Decorator = click.option(name, envvar=env, show_envvar=True, show_default=True, **kwargs)
    return made


class Counts(click.ParamType):  # type: ignore[type-arg]
    """Row counts: whole numbers above 0, with commas between."""

    name = "N,N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """See `click.ParamType.convert`."""
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(sorted({int(part) for part in value.split(",")}))
        except ValueError:
            self.fail(
                f"row counts are whole numbers with commas between, got {value!r}", param, ctx
            )
        if counts[0] < 1:
            self.fail(f"row counts are 1 or more, got {value!r}", param, ctx)
        return counts


class Ranges(click.ParamType):  # type: ignore[type-arg]
    """Partitions: numbers and ranges, with commas between."""

    name = "A-B,C,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> frozenset[int]:
        """See `click.ParamType.convert`."""
        if isinstance(value, frozenset):
            return value
        found: set[int] = set()
        for part in value.split(","):
            first, _, last = part.partition("-")
            if not first.isdigit() or (last and not last.isdigit()):
                self.fail(
                    f"partitions are numbers and ranges, as in 0-3,7; got {value!r}", param, ctx
                )
            found.update(range(int(first), int(last or first) + 1))
        return frozenset(found)
