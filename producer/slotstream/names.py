"""Names and keys: what an app, a session and a partition are called in Redis.

Every key of one partition carries that partition's hash tag, `{app:p}`, so that one script
can change a session's streams and its row together, on Redis Cluster too.
"""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass
from functools import cached_property

from slotstream.errors import BadName

_APP = re.compile(r"[a-z0-9_-]{1,64}")
_SESSION = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_WORKER = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_app(app: str) -> str:
    """Return `app` if it is a valid app name, else raise `BadName`."""
    if not _APP.fullmatch(app):
        raise BadName(f"an app's name is 1 to 64 of a-z 0-9 _ -, got {app!r}")
    return app


def check_session(session: str) -> str:
    """Return `session` if it is a valid session id, else raise `BadName`."""
    if not _SESSION.fullmatch(session):
        raise BadName(f"a session's id is 1 to 128 of A-Z a-z 0-9 . _ : / -, got {session!r}")
    return session


def check_worker(name: str) -> str:
    """Return `name` if it is a valid worker name (without its nonce), else raise `BadName`."""
    if not _WORKER.fullmatch(name):
        raise BadName(f"a worker's name is 1 to 64 of A-Z a-z 0-9 _ -, got {name!r}")
    return name


def is_session(name: bytes) -> bool:
    """Whether `name` is a valid session id, as bytes from Redis."""
    return _SESSION.fullmatch(name.decode("latin-1")) is not None


def partition_of(session: str, partitions: int) -> int:
    """Partition of a session: CRC16 (XMODEM, Redis Cluster's) of the id up to its first `/`."""
    if partitions == 1:
        return 0
    stem = session.split("/", 1)[0]
    return binascii.crc_hqx(stem.encode("ascii"), 0) % partitions


def config_key(app: str) -> str:
    """Key of the app's configuration hash."""
    return f"{check_app(app)}:config"


@dataclass(frozen=True)
class Keys:
    """The keys of one partition of an app."""

    app: str
    partition: int = 0

    def __post_init__(self) -> None:
        check_app(self.app)

    @cached_property
    def prefix(self) -> str:
        """What every key of the partition begins with; the scripts build their keys from it."""
        return f"{{{self.app}:{self.partition}}}:"

    @cached_property
    def control(self) -> str:
        """Stream of `open` and `close` messages."""
        return self.prefix + "control"

    @cached_property
    def waiting(self) -> str:
        """Sorted set of the sessions that wait for a worker."""
        return self.prefix + "waiting"

    @cached_property
    def sessions(self) -> str:
        """Set of the sessions that have a row and are not closed."""
        return self.prefix + "sessions"

    @cached_property
    def workers(self) -> str:
        """Set of the workers that may own something."""
        return self.prefix + "workers"

    @cached_property
    def epoch(self) -> str:
        """Counter that epochs come from."""
        return self.prefix + "epoch"

    @cached_property
    def aside(self) -> str:
        """Set of the sessions that have been set aside."""
        return self.prefix + "aside"

    def shared(self, *workers: str) -> list[str]:
        """Keys of the partition that scripts of these workers use, beside those of sessions."""
        own = [key for w in workers for key in (self.lease(w), self.owned(w))]
        return [self.waiting, self.sessions, self.workers, self.epoch, self.aside, *own]

    def of(self, session: str) -> list[str]:
        """All keys of a session."""
        kinds = ("slot", "in", "out", "aside", "aside-in")
        return [f"{self.prefix}{kind}:{session}" for kind in kinds]

    def inbox(self, session: str) -> str:
        """Stream of a session's frames and in-band operations."""
        return f"{self.prefix}in:{session}"

    def outbox(self, session: str) -> str:
        """Stream of a session's replies."""
        return f"{self.prefix}out:{session}"

    def row(self, session: str) -> str:
        """Hash: the session's row of the slot table."""
        return f"{self.prefix}slot:{session}"

    def lease(self, worker: str) -> str:
        """String that exists while the worker is alive."""
        return f"{self.prefix}lease:{worker}"

    def order(self, worker: str) -> str:
        """String, expires: what an operator asks of the worker (`drain`, `shed 12`)."""
        return f"{self.prefix}order:{worker}"

    def owned(self, worker: str) -> str:
        """Set of the sessions the worker owns."""
        return f"{self.prefix}owned:{worker}"
