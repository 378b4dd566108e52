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

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from types import TracebackType
from typing import Any

from slotstream import flow
from slotstream.codec import MAX_FRAME_BYTES, FrameCodec, encode
from slotstream.errors import SessionExists
from slotstream.ids import ZERO, EntryId
from slotstream.link import Link
from slotstream.names import Keys, check_app, check_session, config_key, partition_of
from slotstream.replies import Reply
from slotstream.session import Session

_STREAMS_A_READ = 512
_REPLIES_A_READ = 256
_POLL_S = 0.002


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
        self.app, self.window = check_app(app), window
        self.link = Link(url, patience_s)
        self._frames: FrameCodec | None = None
        self._partitions: int | None = None

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
        """The client library's own object, for what is not in here."""
        return self.link.redis

    def disconnect(self) -> None:
        """Close the connections; sessions stay open, and can be attached to again."""
        self.link.redis.close()

    # Sessions

    def open(self, session_id: str | None = None, *, replies: str | None = None) -> Session:
        """Open a session at rest; frames may be pushed at once, before a worker has it.

        Args:
            session_id: its id; a new random one by default. An id used before is used again,
                its old replies deleted, when the session of that id has ended.
            replies: `wait` pauses the session instead of dropping replies that were not read in
                time; this client then deletes replies from Redis as it reads them.

        Raises:
            SessionExists: a session of that id is open; `attach` goes on with it.
        """
        session = secrets.token_hex(8) if session_id is None else session_id
        return self.open_many([session], replies=replies, new=session_id is None)[0]

    def open_many(
        self, session_ids: Sequence[str], *, replies: str | None = None, new: bool = False
    ) -> list[Session]:
        """`open` of many sessions in a few round trips; all are opened, or none.

        Args:
            session_ids: their ids.
            replies: as for `open`.
            new: the ids have never been used, so nothing needs to make way.

        Raises:
            SessionExists: one of them is open.
        """
        if replies not in (None, "wait"):
            raise ValueError(f"replies is 'wait' or left out, got {replies!r}")
        names = [check_session(session) for session in session_ids]
        keys = [self.keys(name) for name in names]
        if not new:
            self._make_way(names, keys)
        options = ("replies", replies) if replies else ()
        # With a token of its own, an open that is repeated after an outage opens once.
        self.link.calls([
            ("XADD", k.control, "*", "op", "open", "session", name,
             "token", secrets.token_hex(8), *options)
            for name, k in zip(names, keys, strict=True)
        ])  # fmt: skip
        return [
            Session(self, name, k, trims=replies == "wait")
            for name, k in zip(names, keys, strict=True)
        ]

    def attach(self, session_id: str, *, after: EntryId = ZERO) -> Session:
        """Go on with a session that is open: push into it, read its replies after `after`."""
        session = check_session(session_id)
        last = self.last_entry(session)
        return Session(self, session, self.keys(session), read_to=after, last=last, follows=True)

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
        return flow.run(self, streams, timeout_s=timeout_s, rate_hz=rate_hz, on_reply=on_reply)

    def close_session(self, session: str) -> None:
        """Append a `close`; harmless when it is repeated, or the session has ended."""
        control = self.keys(session).control
        self.link.calls([("XADD", control, "*", "op", "close", "session", session)])

    def cancel(self, session: str, entry: EntryId) -> bool:
        """Cancel an entry that has not been answered; whether it was there to cancel."""
        keys = self.keys(session)
        text = (files("slotstream") / "cancel.lua").read_text()
        row, inbox = keys.row(session), keys.inbox(session)
        return bool(self.link.call("EVAL", text, 2, row, inbox, str(entry)) == 1)

    # What sessions are made of

    def keys(self, session: str) -> Keys:
        """Keys of the session's partition."""
        if self._partitions is None:
            self._learn()
        return Keys(self.app, partition_of(session, self._partitions or 1))

    def config(self) -> dict[str, str]:
        """The app's configuration as its first worker wrote it; empty where none has."""
        flat = iter(self.link.call("HGETALL", config_key(self.app)))
        return {name.decode(): value.decode() for name, value in zip(flat, flat, strict=True)}

    def encode(self, array: Any) -> bytes:
        """Encode a frame; one that the app cannot take is refused here, where that is known."""
        if self._frames is None:
            self._learn()
        return encode(array) if self._frames is None else self._frames.encode(array)

    def last_entry(self, session: str) -> EntryId:
        """The last id that a session's stream has had; `0-0` for one that is not there."""
        inbox = self.keys(session).inbox(session)
        if not self.link.call("EXISTS", inbox):
            return ZERO
        info = self.link.call("XINFO", "STREAM", inbox)
        return EntryId.parse(info[info.index(b"last-generated-id") + 1])

    def arrived(self, session: Session, entry: EntryId) -> bool:
        """Whether an entry is in `in`, or has been answered in `out`."""
        return any(
            self.link.call("XRANGE", key, str(entry), str(entry))
            for key in (session.keys.inbox(session.id), session.keys.outbox(session.id))
        )

    def read_replies(
        self, sessions: Mapping[str, Session], block_s: float
    ) -> dict[str, list[Reply]]:
        """New replies of many sessions, waiting up to `block_s` for the first."""
        names = list(sessions)
        if len(names) <= _STREAMS_A_READ:
            return self._read_part(list(sessions.values()), block_s)
        # Of several reads none may wait, since the others' replies would wait with it.
        found: dict[str, list[Reply]] = {}
        for start in range(0, len(names), _STREAMS_A_READ):
            part = [sessions[name] for name in names[start : start + _STREAMS_A_READ]]
            found.update(self._read_part(part, None))
        if not found:
            time.sleep(min(block_s, _POLL_S))
        return found

    def _read_part(
        self, sessions: Sequence[Session], block_s: float | None
    ) -> dict[str, list[Reply]]:
        by_key = {s.keys.outbox(s.id).encode(): s for s in sessions}
        wait = () if block_s is None else ("BLOCK", max(int(block_s * 1000), 1))
        ids = [str(session.read_to) for session in sessions]
        answer = self.link.call("XREAD", "COUNT", _REPLIES_A_READ, *wait, "STREAMS", *by_key, *ids)
        found = {}
        for key, entries in answer or ():
            session = by_key[key]
            replies = [session.take(id_, raw) for id_, raw in entries]
            found[session.id] = [reply for reply in replies if reply is not None]
            if session.trims:
                self.link.call("XTRIM", key, "MINID", "=", str(session.read_to.next()))
        return found

    def _make_way(self, names: list[str], keys: list[Keys]) -> None:
        """Make way for new sessions of ids used before; refuses while one is open."""
        statuses = self.link.calls(
            [("HGET", k.row(name), "status") for name, k in zip(names, keys, strict=True)]
        )
        closed = []
        for name, k, status in zip(names, keys, statuses, strict=True):
            if status == b"closed":
                closed.append(("DEL", k.inbox(name), k.outbox(name)))
            elif status is not None:
                raise SessionExists(
                    f"session {name} is open ({status.decode()}); attach() goes on with it, "
                    "close() ends it"
                )
        self.link.calls(closed)

    def _learn(self) -> None:
        """Read the app's configuration, where it exists already."""
        held = self.config()
        if held:
            self._partitions = int(held["partitions"])
            shape = (int(held["frame"]), *json.loads(held["sample_shape"]))
            limit = int(held.get("max_frame_bytes", MAX_FRAME_BYTES))
            self._frames = FrameCodec(held["dtype"], shape, max_bytes=limit)
