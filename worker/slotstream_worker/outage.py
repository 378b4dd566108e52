"""Outages of Redis: waited out visibly, logged once, with longer and longer waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from redis.exceptions import RedisError

from slotstream.endpoint import passes

log = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0


class Outage:
    """Runs what needs one server, and remembers whether it can be reached.

    Args:
        what: what it is called in the log.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._wait_s, self._since, self._retry_at = _FIRST_WAIT_S, 0.0, 0.0

    @property
    def on(self) -> bool:
        """Whether the last thing run failed."""
        return self._since > 0.0

    @property
    def lasts_s(self) -> float:
        """Seconds since it began; 0 without one."""
        return time.monotonic() - self._since if self.on else 0.0

    @property
    def wait_s(self) -> float:
        """Seconds until it is worth trying again; 0 without an outage."""
        return max(self._retry_at - time.monotonic(), 0.0) if self.on else 0.0

    def through(self, act: Callable[[], None]) -> bool:
        """Run `act`; whether it went through. Raises what does not pass by waiting."""
        try:
            act()
        except (RedisError, OSError) as error:
            if not passes(error):
                raise
            if not self.on:
                self._since = time.monotonic()
                log.warning("%s: %s; waiting", self._what, error)
            self._retry_at = time.monotonic() + self._wait_s
            self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
            return False
        return True

    def over(self) -> None:
        """Everything works again."""
        if self.on:
            log.warning("%s: back after %.1f s", self._what, self.lasts_s)
        self._wait_s, self._since = _FIRST_WAIT_S, 0.0
