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
    """A future as any other; its condition belongs to all futures of its server.

    Made by a class of its server's own, which has the condition. What the base would set for each
    is there once for all, until it says something.
    """

    _condition: threading.Condition
    _state: str = PENDING
    _result: Any = None
    _exception: BaseException | None = None

    def __init__(self) -> None:  # not the base's, which would make a condition
        pass

    # The base's fields, made when they are asked for.

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        return self.__dict__.setdefault("waiters", [])

    @property
    def _done_callbacks(self) -> list[Any]:
        return self.__dict__.setdefault("callbacks", [])

    def result(self, timeout: float | None = None) -> Any:
        """As the base's; another's end does not count as this one's."""
        if self._state == FINISHED and self._exception is None:
            return self._result  # the usual: nothing changes it any more
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
    """The futures of one server.

    `new` makes one that is pending. `lock` is held while several are claimed.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.new: type[FrameFuture] = type("FrameFuture", (FrameFuture,), {"_condition": self.lock})

    def claim(self, future: FrameFuture) -> bool:
        """Note that it runs now; False where it was cancelled. The lock is held."""
        if future._state == PENDING:
            future._state = RUNNING
            return True
        return future.set_running_or_notify_cancel()

    def resolve(self, futures: Sequence[FrameFuture], results: Iterable[Any]) -> None:
        """Give claimed futures their results, all at once."""
        called = []
        with self.lock:
            for future, result in zip(futures, results, strict=True):
                future._result, future._state = result, FINISHED
                more = future.__dict__
                if "waiters" in more:
                    for waiter in future._waiters:
                        waiter.add_result(future)
                if "callbacks" in more:
                    called.append(future)
            self.lock.notify_all()
        for future in called:
            future._invoke_callbacks()  # type: ignore[attr-defined]
