"""A bare echo through two streams: what any worker behind Redis takes at least.

    python -m benchmarks.echo URL IN OUT

Blocks on XREAD of IN; answers every entry in OUT under the same id with as many bytes as a reply
of the suite's model has. One write a batch: the answers, and the next XREAD.
"""

from __future__ import annotations

import sys

from benchmarks.lean import Connection, pack

REPLY = ("output", bytes(431), "weights", "0123456789ab")


def main(url: str, inbox: str, outbox: str) -> None:
    """Echo until ended."""
    connection, last = Connection(url), b"0-0"
    connection.call("DEL", outbox)
    calls: list[bytes] = []
    connection.call("XADD", outbox, "0-1", "op", "opened")  # ready
    while True:
        read = pack("XREAD", "COUNT", 1000, "BLOCK", 0, "STREAMS", inbox, last)
        connection.send(b"".join([*calls, read]))
        for _ in calls:
            connection.receive()
        ((_, entries),) = connection.receive()
        last = entries[-1][0]
        calls = [pack("XADD", outbox, id_, *REPLY) for id_, _ in entries]


if __name__ == "__main__":
    main(*sys.argv[1:4])
