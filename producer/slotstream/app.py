"""One app as a producer sees it: its keys, its configuration, and entries of its streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.resources import files
from typing import Any

import numpy as np
import redis

from slotstream.bursts import ANY, Buffer, Fields, Frames
from slotstream.codec import FrameCodec, encode
from slotstream.errors import BadFrame, Unavailable
from slotstream.ids import ZERO, EntryId
from slotstream.link import Link
from slotstream.named import AnyFrames, frames_of
from slotstream.names import Keys, check_app, config_key, partition_of


class App:
    """An app behind a link. What it knows of its configuration is read when it is needed."""

    def __init__(self, link: Link, app: str) -> None:
        self.link, self.name = link, check_app(app)
        self._frames: AnyFrames | None = None
        self._before = b""  # of every frame's data, where the codec is known
        self._partitions: int | None = None

    def keys(self, session: str) -> Keys:
        """Keys of the session's partition."""
        if self._partitions is None:
            self._learn()
        return Keys(self.name, partition_of(session, self._partitions or 1))

    def partitions(self) -> list[Keys]:
        """Keys of every partition of the app."""
        if self._partitions is None:
            self._learn()
        return [Keys(self.name, p) for p in range(self._partitions or 1)]

    def config(self) -> dict[str, str]:
        """The app's configuration as its first worker wrote it; empty where none has."""
        flat = iter(self.link.call("HGETALL", config_key(self.name)))
        return {name.decode(): value.decode() for name, value in zip(flat, flat, strict=True)}

    def encode(self, array: Any, *, last: bool = False) -> bytes:
        """Encode a frame; one that the app cannot take is refused here, where that is known.

        Args:
            array: the frame; a mapping of names to arrays where the model has several inputs.
            last: it ends its session, and may have fewer steps.
        """
        if self._frames is None:
            self._learn()
        return encode(array) if self._frames is None else self._frames.encode(array, last=last)

    def encoder(self) -> tuple[bytes, Callable[[Any], bytes]]:
        """The two parts of `Frames`: the first, and what makes the second of a frame, by a copy.

        It refuses frames as `encode` does.
        """
        if self._frames is None:
            self._learn()
        if self._frames is None:
            return ANY, lambda array: Frames.whole(encode(array))
        return self._before, self._frames.data

    def frames(self, frames: Iterable[Any]) -> Frames:
        """Frames ready to be sent.

        Raises:
            BadFrame: the app cannot take one of them; says which.
        """
        before, data = self.encoder()
        known = self._frames
        if (
            isinstance(frames, np.ndarray)
            and isinstance(known, FrameCodec)
            and frames.ndim == len(known.shape) + 1
        ):
            return Frames(before, known.datas(frames))
        datas: list[Buffer] = []
        for k, frame in enumerate(frames):
            try:
                datas.append(data(frame))
            except BadFrame as error:
                raise BadFrame(error.code, f"frame {k}: {error}") from None
        return Frames(before, datas)

    def last_entry(self, session: str) -> EntryId:
        """The last id that a session's stream has had; `0-0` for one that is not there."""
        inbox = self.keys(session).inbox(session)
        if not self.link.call("EXISTS", inbox):
            return ZERO
        info = self.link.call("XINFO", "STREAM", inbox)
        return EntryId.parse(info[info.index(b"last-generated-id") + 1])

    def arrived(self, session: str, entry: EntryId) -> bool:
        """Whether an entry is in `in`, or has been answered in `out`."""
        keys = self.keys(session)
        return any(
            self.link.call("XRANGE", key, str(entry), str(entry))
            for key in (keys.inbox(session), keys.outbox(session))
        )

    def close(self, session: str) -> None:
        """Append a `close`; harmless when it is repeated, or the session has ended."""
        control = self.keys(session).control
        self.link.calls([("XADD", control, "*", "op", "close", "session", session)])

    def append(self, session: str, entry: EntryId, fields: Fields, *, repeated: bool) -> bool:
        """Append an entry once; whether it is there now. False: the id is not larger than all.

        Args:
            session: whose stream.
            entry: the id.
            fields: the entry's fields.
            repeated: it may have been appended before, the answer lost: then it counts as there
                when it is in `in` or has been answered, or the session has ended meanwhile.
        """
        keys = self.keys(session)
        flat = [part for pair in fields.items() for part in pair]
        # A session that ended took its stream along: a repeated push must not make a new one.
        make = ("NOMKSTREAM",) if repeated else ()
        try:
            if self.link.once("XADD", keys.inbox(session), *make, str(entry), *flat) is not None:
                return True
            if self.link.once("HGET", keys.row(session), "status") == b"closed":
                return True
            self.link.once("XADD", keys.inbox(session), str(entry), *flat)
        except redis.ResponseError as error:
            if "equal or smaller" not in str(error):
                raise
            return repeated and self.arrived(session, entry)
        return True

    def cancel(self, session: str, entry: EntryId) -> bool:
        """Cancel an entry that has not been answered; whether it was there to cancel."""
        keys = self.keys(session)
        text = (files("slotstream") / "cancel.lua").read_text()
        row, inbox = keys.row(session), keys.inbox(session)
        tries = 0

        def send() -> Any:
            nonlocal tries
            tries += 1
            return self.link.once("EVAL", text, 2, row, inbox, str(entry))

        found = self.link.patiently(send)
        # A first try whose answer was cut off may have taken it out.
        return bool(found == 1 or (found == 0 and tries > 1 and not self.arrived(session, entry)))

    def _learn(self) -> None:
        """Read the app's configuration, where it exists already."""
        held = self.config()
        if held:
            self._partitions = int(held["partitions"])
            self._frames = frames_of(held)
            self._before = Frames.before_data(
                self._frames.header, self._frames.size - len(self._frames.header)
            )
        elif self.link.endpoint.cluster:
            raise Unavailable(
                f"app {self.name} has no configuration yet, so its partitions are not known: start "
                "a worker first"
            )
