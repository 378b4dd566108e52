"""What the engine raises."""

from __future__ import annotations


class CannotStream(ValueError):
    """A model that cannot be served, with the reason and what to change."""


class PoolFull(RuntimeError):
    """More sessions than slots."""


class StalePlan(RuntimeError):
    """A plan made before one of its rows was forked, reset, released or written."""
