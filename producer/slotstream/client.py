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
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from importlib.resources import files
from types import TracebackType
from typing import Any, TypeVar

import redis

from slotstream import flow
from slotstream.codec import MAX_FRAME_BYTES, FrameCodec, encode
from slotstream.connect import connect
from slotstream.errors import SessionExists
from slotstream.ids import ZERO, EntryId
from slotstream.names import Keys, check_app, check_session, config_key, partition_of
from slotstream.replies import Reply
from slotstream.session import Session

T = TypeVar("T")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0
_STREAMS_A_READ = 512
_PASSING = (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError,
            redis.ReadOnlyError, redis.OutOfMemoryError)


class Client:
    """A producer's connection to one app. For one thread at a time.

    Args:
        url: of the Redis server.
        app: prefix of the app's keys.
        window: entries a session may have in flight before `push` waits.
        patience_s: how long an outage of Redis is waited out before its error is raised.
    """

    def __init__(self, url: str = "redis://localhost:6379/0", app: str = "slotstream", *,
                 window: int = 64, patience_s: float = 30.0) -> None:
        if window < 1:
            raise ValueError(f"the window is at least 1 entry, got {window}")
        self.app, self.window, self.patience_s = check_app(app), window, patience_s
        self.redis: Any = connect(url, name="slotstream-producer")
        self._frames: FrameCodec | None = None
        self._partitions: int | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connections; sessions stay open, and can be attached to again."""
        self.redis.close()

    # Sessions

    def open(self, session_id: str | None = None, *, replies: str | None = None) -> Session:
        """Open a session at rest; frames may be pushed at once, before a worker has it.

        Args:
            session_id: its id; a new random one by default. An id used before is used again,
                its old replies deleted, when the session of that id has ended.
            replies: `wait` pauses the session instead of dropping replies that were not read in
                time; the reader then trims `out` behind itself (`Client.run` does).

        Raises:
            SessionExists: a session of that id is open; `attach` goes on with it.
        """
        session = secrets.token_hex(8) if session_id is None else session_id
        return self.open_many([session], replies=replies, new=session_id is None)[0]

    def open_many(self, session_ids: Sequence[str], *, replies: str | None = None,
                  new: bool = False) -> list[Session]:
        """`open` of many sessions in a few round trips; all are opened, or none.

        Args:
            session_ids: their ids.
            replies: as for `open`.
            new: the ids have never been used, so nothing needs to make way.

        Raises:
            SessionExists: one of them is open.
        """
        names = [check_session(session) for session in session_ids]
        keys = [self._keys(name) for name in names]
        if not new:
            self._make_way(names, keys)
        tokens = {name: secrets.token_hex(8) for name in names}  # the same if it is repeated
        self._pipelined([("XADD", k.control, "*", *_open_fields(name, tokens[name], replies))
                         for name, k in zip(names, keys, strict=True)])
        return [Session(self, name, k, trims=replies == "wait")
                for name, k in zip(names, keys, strict=True)]

    def attach(self, session_id: str, *, after: EntryId = ZERO) -> Session:
        """Go on with a session that is open: push into it, read its replies after `after`."""
        session = check_session(session_id)
        keys = self._keys(session)
        return Session(self, session, keys, read_to=after, last=self.last_entry(session),
                       follows=True)

    def _make_way(self, names: list[str], keys: list[Keys]) -> None:
        """Make way for new sessions of ids used before; refuses while one is open."""
        statuses = self._pipelined([("HGET", k.row(n), "status")
                                    for n, k in zip(names, keys, strict=True)])
        for name, status in zip(names, statuses, strict=True):
            if status not in (None, b"closed"):
                raise SessionExists(f"session {name} is open ({status.decode()}); attach() goes on "
                                    "with it, close() ends it")
        self._pipelined([("DEL", k.inbox(n), k.outbox(n)) for n, k, status in
                         zip(names, keys, statuses, strict=True) if status == b"closed"])

    def run(self, streams: Mapping[str, Iterable[Any]], *, timeout_s: float = 60.0,
            rate_hz: float | None = None,
            on_reply: Callable[[str, Reply], None] | None = None) -> dict[str, list[Reply]]:
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

    # What sessions are made of

    def config(self) -> dict[str, str]:
        """The app's configuration as its first worker wrote it; empty where none has."""
        held = self.patiently(lambda: self.redis.hgetall(config_key(self.app)))
        return {name.decode(): value.decode() for name, value in held.items()}

    def encode(self, array: Any) -> bytes:
        """Encode a frame; one that the app cannot take is refused here, where that is known."""
        if self._frames is None:
            self._learn()
        return encode(array) if self._frames is None else self._frames.encode(array)

    def close_session(self, session: str) -> None:
        """Append a `close`; harmless when it is repeated, or the session has ended."""
        self._pipelined([("XADD", self._keys(session).control, "*", "op", "close", "session",
                          session)])

    def cancel(self, session: str, entry: EntryId) -> bool:
        """Cancel an entry that has not been answered; whether it was there to cancel."""
        keys = self._keys(session)
        result = self.patiently(lambda: self._cancel(
            keys=[keys.row(session), keys.inbox(session)], args=[str(entry)]))
        return bool(result == 1)

    def last_entry(self, session: str) -> EntryId:
        """The last id that a session's stream has had; `0-0` for one that was never written."""
        inbox = self._keys(session).inbox(session)
        try:
            info = self.patiently(lambda: self.redis.xinfo_stream(inbox))
        except redis.ResponseError as error:
            if "no such key" in str(error):
                return ZERO
            raise
        return EntryId.parse(info["last-generated-id"])

    def arrived(self, session: Session, entry: EntryId) -> bool:
        """Whether an entry is in `in`, or has been answered in `out`."""
        for key in (session.keys.inbox(session.id), session.keys.outbox(session.id)):
            if self.patiently(lambda key=key: self.redis.xrange(key, str(entry), str(entry))):
                return True
        return False

    def read_replies(self, sessions: Mapping[str, Session],
                     block_s: float) -> dict[str, list[Reply]]:
        """New replies of many sessions, waiting up to `block_s` for the first."""
        found: dict[str, list[Reply]] = {}
        names = list(sessions)
        for start in range(0, len(names), _STREAMS_A_READ):
            part = {sessions[n].keys.outbox(n): n for n in names[start : start + _STREAMS_A_READ]}
            # Only one of several reads may wait, and none once something has come.
            wait = [] if len(names) > _STREAMS_A_READ or found else \
                ["BLOCK", max(int(block_s * 1000), 1)]
            command = ["XREAD", "COUNT", 256, *wait, "STREAMS", *part,
                       *[str(sessions[n].read_to) for n in part.values()]]
            for key, entries in self.patiently(lambda c=command: self._raw(c)) or ():
                session = sessions[part[key.decode()]]
                replies = [session.take(id_, raw) for id_, raw in entries]
                found[session.id] = [reply for reply in replies if reply is not None]
                if session.trims:
                    self.patiently(lambda k=key, s=session: self.redis.xtrim(
                        k, minid=str(s.read_to.next()), approximate=False))
        if not found and len(names) > _STREAMS_A_READ:
            time.sleep(min(block_s, 0.002))
        return found

    def patiently(self, act: Callable[[], T]) -> T:
        """Do what may be repeated, again and again through an outage of `patience_s` at most."""
        deadline, wait_s = time.monotonic() + self.patience_s, _FIRST_WAIT_S
        while True:
            try:
                return act()
            except _PASSING:
                if time.monotonic() > deadline:
                    raise
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _pipelined(self, commands: Sequence[tuple[str, ...]]) -> list[Any]:
        """Answers of many commands that may all be repeated; raises the first refusal."""
        def send() -> list[Any]:
            pipeline = self.redis.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = pipeline.execute()
            return answers

        return self.patiently(send) if commands else []

    def _raw(self, command: list[Any]) -> Any:
        """A command's answer as Redis gave it, without the library's own reading of it."""
        connection = self.redis.connection_pool.get_connection()
        try:
            connection.send_command(*command)
            return connection.read_response()
        except BaseException:
            # Half an answer may still be on its way: nobody must read it as another's.
            connection.disconnect()
            raise
        finally:
            self.redis.connection_pool.release(connection)

    @cached_property
    def _cancel(self) -> Any:
        return self.redis.register_script((files("slotstream") / "cancel.lua").read_text())

    def _keys(self, session: str) -> Keys:
        if self._partitions is None:
            self._learn()
        return Keys(self.app, partition_of(session, self._partitions or 1))

    def _learn(self) -> None:
        """Read the app's configuration, where it exists already."""
        held = self.config()
        if held:
            import json

            self._partitions = int(held["partitions"])
            shape = (int(held["frame"]), *json.loads(held["sample_shape"]))
            self._frames = FrameCodec(held["dtype"], shape,
                                      max_bytes=int(held.get("max_frame_bytes", MAX_FRAME_BYTES)))


def _open_fields(session: str, token: str, replies: str | None) -> tuple[str, ...]:
    fields = ("op", "open", "session", session, "token", token)
    return (*fields, "replies", replies) if replies else fields
