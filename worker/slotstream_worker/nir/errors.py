"""What is wrong with a graph."""

from __future__ import annotations

from slotstream_worker.engine.errors import CannotStream


class BadGraph(CannotStream):
    """A NIR file or graph that cannot be served: names the node, what is wrong, and what to do."""
