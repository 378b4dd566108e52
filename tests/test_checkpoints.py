"""A row in Redis is the state after the entry that its cursor names, at every instant."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from conftest import streams_of, wait_until
from serving_models import served
from slotstream import Client
from slotstream.ids import EntryId
from slotstream.names import Keys
from slotstream_worker.engine.engine import Engine
from slotstream_worker.engine.rows import RowsReading

KEYS = Keys("slotstream")
FRAMES = 400


@pytest.fixture(scope="module")
def model():
    return served()


@pytest.fixture(scope="module")
def states(model):
    """Sessions' streams, and each one's row after so many of its frames."""
    streams = streams_of(6, FRAMES, model.frame_shape, seed=21)
    engine = Engine(model, 8)
    engine.prepare((4,))
    engine.pool.admit(streams)
    after = [dict.fromkeys(streams, b"")]
    for k in range(FRAMES):
        engine.run(list(streams), np.stack([stream[k] for stream in streams.values()]))
        after.append(dict(zip(streams, engine.pool.read(list(streams)), strict=True)))
    assert len({row["s0"] for row in after}) == FRAMES + 1
    return streams, after


@pytest.mark.parametrize("how", ["backlog", "trickle", "slow reads"])
def test_every_row_that_is_ever_seen_is_the_state_at_its_cursor(
    redis_url, thread_worker, model, states, how, monkeypatch
):
    """A backlog runs several frames a launch; a trickle one at a time. Checkpoints all along.

    Where a row takes long to come off the device, its session is answered more meanwhile.
    """
    streams, after = states
    if how == "slow reads":
        rng = random.Random(5)
        ready = RowsReading.ready.fget
        slow = property(lambda reading: rng.random() < 0.1 and ready(reading))
        monkeypatch.setattr(RowsReading, "ready", slow)
    worker = thread_worker(model, slots=8, checkpoint_interval_s=0.02, sweep_s=0.3)
    seen: dict[str, set[int]] = {name: set() for name in streams}
    with Client(redis_url) as client:
        sessions = client.open_many(list(streams))

        def look() -> int:
            lengths = []
            for one in sessions:
                cursor, state = client.redis.hmget(KEYS.row(one.id), "cursor", "state")
                done = EntryId.parse(cursor or b"0-0").ms
                assert (state or b"") == after[done][one.id], (one.id, done)
                seen[one.id].add(done)
                lengths.append(client.redis.xlen(one.outbox))
            return min(lengths)

        for start in range(0, FRAMES, 20):
            pipe = client.redis.pipeline(transaction=False)
            for one in sessions:
                for k in range(start, start + 20):
                    frame = client.app.encode(streams[one.id][k])
                    pipe.execute_command("XADD", one.inbox, f"{k + 1}-0", "frame", frame)
            pipe.execute()
            look()
            if how != "backlog":
                time.sleep(0.03)
        wait_until(lambda: look() > FRAMES, 60, "all are answered")
        wait_until(lambda: look() and all(FRAMES in done for done in seen.values()), 20, "saved")
    assert min(map(len, seen.values())) > 4, "too few checkpoints were seen to say anything"
    assert worker.error is None
