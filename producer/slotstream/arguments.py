"""Arguments of a command to Redis, packed as they are added.

A command is the number of its arguments and then each with its length. Where commands go by the
hundred thousand a second, their parts are made once, or many at a time, and joined.
"""

from __future__ import annotations

Arg = bytes | str | int | float

LENGTHS = [b"%d\r\n" % n for n in range(512)]
"""The length of a short argument, as it stands between `$` and the argument."""


def argument(value: bytes) -> bytes:
    """One argument of a command, as Redis reads it."""
    return b"$%d\r\n%b\r\n" % (len(value), value)


def around(length: int) -> tuple[bytes, bytes]:
    """What stands before and after an argument of `length` bytes."""
    return b"$%d\r\n" % length, b"\r\n"


class Arguments:
    """Arguments one after another. `parts` joined are their bytes, `count` is how many they are."""

    __slots__ = ("count", "parts")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.count = 0

    def add(self, *values: Arg) -> None:
        """Add arguments."""
        self.parts += [
            argument(value if isinstance(value, bytes) else str(value).encode()) for value in values
        ]
        self.count += len(values)
