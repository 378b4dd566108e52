"""Futures of many frames under one lock: they are made, claimed and resolved a round at a time.

A `concurrent.futures.Future` has a lock and a condition of its own, which costs more to make than a
small frame costs to run, and leaves the garbage collector eight objects a frame to follow. The
futures of one server are made by one thread and resolved together, so they can share one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, PENDING, RUNNING
from typing import Any

_OVER = (CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED)


class FrameFuture(Future[Any]):
    """A future as any other; its condition belongs to all futures of its server."""

    def __init__(self, condition: threading.Condition) -> None:
        # In place of the base's own, which would make a condition; the fields are the base's.
        self._condition = condition
        self._state: str = PENDING
        self._result: Any = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []

    def result(self, timeout: float | None = None) -> Any:
        """As the base's; another's end does not count as this one's."""
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As the base's; another's end does not count as this one's."""
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        if self._state not in _OVER:
            with self._condition:
                self._condition.wait_for(lambda: self._state in _OVER, timeout)


class Futures:
    """The futures of one server."""

    def __init__(self) -> None:
        self._condition = threading.Condition()

    def new(self) -> FrameFuture:
        """A future that is pending."""
        return FrameFuture(self._condition)

    def claim(self, future: FrameFuture) -> bool:
        """Note that it runs now; False where it was cancelled."""
        if future._state != PENDING:
            return future.set_running_or_notify_cancel()
        with self._condition:  # another thread may cancel it meanwhile
            if future._state == PENDING:
                future._state = RUNNING
                return True
        return future.set_running_or_notify_cancel()

    def resolve(self, futures: Sequence[FrameFuture], results: Iterable[Any]) -> None:
        """Give claimed futures their results, all at once."""
        called = []
        with self._condition:
            for future, result in zip(futures, results, strict=True):
                future._result, future._state = result, FINISHED
                for waiter in future._waiters:
                    waiter.add_result(future)
                if future._done_callbacks:
                    called.append(future)
            self._condition.notify_all()
        for future in called:
            future._invoke_callbacks()  # type: ignore[attr-defined]
