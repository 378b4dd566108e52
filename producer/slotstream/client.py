"""The Python client of a producer.

client = slotstream.Client("redis://localhost:6379/0")
session = client.open()
for frame in frames:                       # [frame, *sample_shape] each
    session.push(frame)
session.end()
for reply in session.replies():
    print(reply.id, reply.output)
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from slotstream import flow
from slotstream.app import App
from slotstream.errors import SessionExists
from slotstream.ids import ZERO, EntryId
from slotstream.link import Link
from slotstream.names import Keys, check_session
from slotstream.replies import Reply
from slotstream.session import Session


class Client:
    """A producer's connection to one app. For one thread at a time.

    Args:
        url: of the Redis server.
        app: prefix of the app's keys.
        window: entries a session may have in flight before `push` waits.
        patience_s: how long an outage of Redis is waited out before its error is raised.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        app: str = "slotstream",
        *,
        window: int = 64,
        patience_s: float = 30.0,
    ) -> None:
        if window < 1:
            raise ValueError(f"the window is at least 1 entry, got {window}")
        self.window = window
        self.link = Link(url, patience_s)
        self.app = App(self.link, app)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.disconnect()

    @property
    def redis(self) -> Any:
        """The client library's own object, for what is not in here (not across a cluster)."""
        return self.link.client(self.app.name)

    def disconnect(self) -> None:
        """Close the connections; sessions stay open, and can be attached to again."""
        self.link.close()

    # Sessions

    def open(
        self,
        session_id: str | None = None,
        *,
        replies: str | None = None,
        keep_frames: bool = False,
    ) -> Session:
        """Open a session at rest; frames may be pushed at once, before a worker has it.

        Args:
            session_id: its id; a new random one by default. An id used before is used again,
                its old replies deleted, when the session of that id has ended.
            replies: `wait` pauses the session instead of dropping replies that were not read in
                time; this client then deletes replies from Redis as it reads them.
            keep_frames: run the frames that were pushed under this id before; without it, what
                an earlier session of the id left is deleted.

        Raises:
            SessionExists: a session of that id is open; `attach` goes on with it.
        """
        session = secrets.token_hex(8) if session_id is None else session_id
        new = session_id is None or keep_frames
        return self.open_many([session], replies=replies, new=new)[0]

    def open_many(
        self, session_ids: Sequence[str], *, replies: str | None = None, new: bool = False
    ) -> list[Session]:
        """`open` of many sessions in a few round trips; all are opened, or none.

        Args:
            session_ids: their ids.
            replies: as for `open`.
            new: the ids have never been used, or what was pushed under them is to be run: nothing
                makes way.

        Raises:
            SessionExists: one of them is open.
        """
        if replies not in (None, "wait"):
            raise ValueError(f"replies is 'wait' or left out, got {replies!r}")
        names = [check_session(session) for session in session_ids]
        keys = [self.app.keys(name) for name in names]
        if not new:
            self._make_way(names, keys)
        options = ("replies", replies) if replies else ()
        # With a token of its own, an open that is repeated after an outage opens once.
        self.link.calls([
            ("XADD", k.control, "*", "op", "open", "session", name,
             "token", secrets.token_hex(8), *options)
            for name, k in zip(names, keys, strict=True)
        ])  # fmt: skip
        return [Session(self.app, name, self.window, trims=replies == "wait") for name in names]

    def attach(self, session_id: str, *, after: EntryId = ZERO) -> Session:
        """Go on with a session that is open: push into it, read its replies after `after`."""
        session = check_session(session_id)
        last = self.app.last_entry(session)
        return Session(self.app, session, self.window, read_to=after, last=last, follows=True)

    def push_many(
        self,
        streams: Mapping[Session, Iterable[Any]],
        *,
        end: bool = False,
        timeout_s: float = 60.0,
    ) -> dict[Session, list[EntryId]]:
        """Push frames of many sessions in few round trips; every frame once, as by `push`.

        All frames are checked before any is sent. Where windows are full, replies are read (and
        kept for `Session.replies`) until they are not.

        Args:
            streams: by session, an array of frames `[n, frame, *sample_shape]`, which is sent
                without a copy, or any frames `[frame, *sample_shape]`. Of a session that was
                attached to, one frame goes in a round trip, since others may push there too.
            end: close each session after its last frame.
            timeout_s: the longest wait for room in any window.

        Returns:
            The frames' ids by session, which are also their replies'; with `end` and no frames,
            the id of the `end`.

        Raises:
            BadFrame: a frame does not fit the app's configuration; says which, and none was sent.
            SessionClosed: a session has ended; before anything was sent, or the frames that were
                left of it were not.
            ReplyTimeout: no window had room for so long; frames may be left.
            OutOfOrder: somebody else numbered entries of a session at the same moment.
        """
        for session in streams:
            if session.app is not self.app:
                raise ValueError(f"{session} is another client's")
        return flow.push_many(streams, end=end, timeout_s=timeout_s)

    def run(
        self,
        streams: Mapping[str, Iterable[Any]],
        *,
        timeout_s: float = 60.0,
        rate_hz: float | None = None,
        on_reply: Callable[[str, Reply], None] | None = None,
    ) -> dict[str, list[Reply]]:
        """Push many sessions' streams and collect all their replies.

        Each session is opened, its frames are pushed as its window allows, the last one with
        `end`, and its replies are read as they come.

        Args:
            streams: frames `[frame, *sample_shape]` by session id; iterated as they are needed.
            timeout_s: the longest wait without any reply.
            rate_hz: frames a second of each session at most; as fast as possible by default.
            on_reply: called with each session id and reply as it is read.

        Returns:
            Each session's replies in order, one a frame.

        Raises:
            ReplyTimeout: no session had a reply for `timeout_s`.
        """
        sessions = self.open_many(list(streams))
        return flow.run(sessions, streams, timeout_s=timeout_s, rate_hz=rate_hz, on_reply=on_reply)

    def config(self) -> dict[str, str]:
        """The app's configuration as its first worker wrote it; empty where none has."""
        return self.app.config()

    def _make_way(self, names: list[str], keys: list[Keys]) -> None:
        """Make way for new sessions of ids used before; refuses while one is open."""
        statuses = self.link.calls(
            [("HGET", k.row(name), "status") for name, k in zip(names, keys, strict=True)]
        )
        aside = self.link.calls(
            [("SISMEMBER", k.aside, name) for name, k in zip(names, keys, strict=True)]
        )
        left = []
        for name, k, status, kept in zip(names, keys, statuses, aside, strict=True):
            if kept:
                raise SessionExists(
                    f"session {name} was set aside; `slotstream retry {name}` goes on with it, "
                    "with --discard it is deleted, and then its id is free"
                )
            # Without a row too: a late push may have outlived the row of the session it was for.
            left += [("DEL", k.inbox(name)), ("DEL", k.outbox(name))]
            if status not in (None, b"closed"):
                raise SessionExists(
                    f"session {name} is open ({status.decode()}); attach() goes on with it, "
                    "close() ends it"
                )
        self.link.calls(left)
