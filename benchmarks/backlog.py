"""Frames put into sessions' streams all at once, by a script inside Redis, and replies counted.

Filling is never timed, and quick (about 4 us a frame), so what runs by the clock in a worker (its
checkpoints, its sweeps) is not seen more often than its share.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.lean import Connection, pack
from slotstream.codec import encode
from slotstream.names import Keys

_FILL = """
local prefix, first, count, kinds = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
for s = 5 + kinds, #ARGV do
  local inbox = prefix .. 'in:' .. ARGV[s]
  for n = 0, count - 1 do
    local id, frame = string.format('%.0f-0', first + n), ARGV[5 + (s + n) % kinds]
    redis.call('XADD', inbox, id, 'frame', frame)
  end
end
return count
"""
_TRIM = """
for s = 2, #ARGV do redis.call('XTRIM', ARGV[1] .. ARGV[s], 'MAXLEN', 0) end
"""
_COUNT = """
local found = 0
for s = 2, #ARGV do found = found + redis.call('XLEN', ARGV[1] .. 'out:' .. ARGV[s]) end
return found
"""


class Backlog:
    """The streams of some sessions of an app, seen from outside its worker.

    Args:
        url: of Redis.
        app: the app.
        sessions: the sessions; ids are given to their frames from one counter.
        frames: different frames `[frame, *sample_shape]`, of which each session gets one after
            another.
    """

    def __init__(self, url: str, app: str, sessions: Sequence[str], frames: Sequence) -> None:
        self.keys, self.sessions = Keys(app), list(sessions)
        self.raw = [encode(frame) for frame in frames]
        self.next_id = 1
        self.connection = Connection(url)
        self._shas = {text: self.connection.script(text) for text in (_FILL, _TRIM, _COUNT)}

    def fill(self, count: int) -> int:
        """Append `count` frames to every session's stream; returns how many in all."""
        for start in range(0, len(self.sessions), 256):
            part = self.sessions[start : start + 256]
            self._run(_FILL, self.keys.prefix, self.next_id, count, len(self.raw), *self.raw, *part)
        self.next_id += count
        return count * len(self.sessions)

    def trim(self, kind: str = "out") -> None:
        """Empty all `out` (or `in`) streams; their last ids stay."""
        self._run(_TRIM, f"{self.keys.prefix}{kind}:", *self.sessions)

    def replies(self) -> int:
        """Entries of all `out` streams."""
        return int(self._run(_COUNT, self.keys.prefix, *self.sessions))

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _run(self, text: str, *args: bytes | str | int) -> object:
        self.connection.send(pack("EVALSHA", self._shas[text], 0, *args))
        return self.connection.receive()
