"""A rolling restart of three workers under load."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from conftest import streams_of, wait_until
from slotstream import Client
from slotstream.operating import workers_of

SESSIONS, RATE_HZ = 60, 10.0
TOP = 4000


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_a_rolling_restart_loses_nothing_and_each_session_waits_for_its_own_hand_over_only(
    redis_url, worker_process, record_property
):
    streams = streams_of(SESSIONS, TOP, (4, 6), seed=12)
    over = threading.Event()

    def frames(name):
        """The session's stream, for as long as the restart takes."""
        for frame in streams[name]:
            yield frame
            if over.is_set():
                return

    options = ("--slots", "64", "--sweep", "1", "--rebalance")
    workers = [worker_process(*options, log=f"w{k}.log").wait_ready() for k in range(3)]
    results = {}

    def produce() -> None:
        with Client(redis_url, window=16) as client:
            results.update(client.run({s: frames(s) for s in streams}, rate_hz=RATE_HZ))

    producer = threading.Thread(target=produce)
    producer.start()
    with Client(redis_url) as client:

        def spread() -> bool:
            held = [w.sessions for w in workers_of(client.app) if w.alive]
            return len(held) == 3 and min(held) >= SESSIONS // 6

        wait_until(spread, 30, "the sessions are spread over three workers")
        for k, old in enumerate(workers):
            new = worker_process(*options, log=f"w{k}-new.log").wait_ready()
            assert old.terminate() == 0
            assert new.process.poll() is None
    over.set()
    producer.join(120)
    assert not producer.is_alive()
    for name in streams:
        ids = [reply.id for reply in results[name]]
        assert len(ids) == len(set(ids)) > 50
        assert results[name][-1].end
        assert ids == sorted(ids)
        assert not any(reply.error for reply in results[name])
    waits = [reply.latency_s for replies in results.values() for reply in replies]
    p50, p99, longest = map(float, np.percentile(waits, [50, 99, 100]))
    record_property("latency_s", (p50, p99, longest))
    print(f"push to reply: p50 {1e3 * p50:.0f} ms, p99 {1e3 * p99:.0f} ms, longest {longest:.2f} s")
    assert longest < 5.0  # half a lease: nobody waited for a death to be noticed
