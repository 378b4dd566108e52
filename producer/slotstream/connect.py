"""Connections to Redis, with every setting that matters said out loud.

Defaults of the client library differ between its versions (socket timeout, protocol, retries),
and each of them has lost somebody data: so they are set here, once.
"""

from __future__ import annotations

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 15.0
MAX_BLOCK_S = 5.0
"""The longest a blocking read blocks: less than the socket timeout, so that silence is an error."""


def connection_pool(url: str, *, name: str = "slotstream") -> redis.ConnectionPool:
    """Pool of connections to `url`: binary replies, RESP2, no retries of the library's own.

    A command whose answer was lost may have been carried out. Only the caller knows whether it
    may be repeated, so the library never does.
    """
    return redis.ConnectionPool.from_url(
        url,
        protocol=2,
        decode_responses=False,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_keepalive=True,
        health_check_interval=0,
        retry=Retry(NoBackoff(), 0),
        client_name=name,
    )


def connect(url: str, *, name: str = "slotstream") -> redis.Redis:
    """Client for `url`, with the settings of `connection_pool`."""
    return redis.Redis(connection_pool=connection_pool(url, name=name))
