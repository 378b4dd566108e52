"""Large states: their checkpoints are spread over time, the oldest first, and moves are exact."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import streams_of, wait_until
from slotstream import Client
from slotstream_worker import models

MIB = 2**20


@pytest.fixture(scope="module")
def heavy():
    """A filter bank whose state is a MiB of float32: a leaky sum of every input at every tap."""
    taps = MIB // 4 // 6

    def step(variables, carry, frames):
        def one(held, x):
            held = held * variables[None] + x[:, None, :]
            return held, held[:, :2, :].mean(axis=1)

        return jax.lax.scan(one, carry, frames)

    decay = np.random.default_rng(0).uniform(0.1, 0.9, (taps, 1)).astype(np.float32)
    return models.carry(step, lambda batch: jnp.zeros((batch, taps, 6)), decay, frame=1,
                        sample_shape=(6,), name="heavy")  # fmt: skip


def test_checkpoints_keep_to_the_budget_and_take_the_oldest_first(redis_url, thread_worker, heavy):
    assert heavy.spec.row_bytes > 0.99 * MIB
    worker = thread_worker(heavy, slots=24, row_counts=(8,), checkpoint_interval_s=0.2,
                           checkpoint_bytes_per_s=6.0 * MIB).worker  # fmt: skip
    streams = streams_of(24, 3, (1, 6), seed=3)
    with Client(redis_url) as client:
        sessions = client.open_many(sorted(streams), new=True)
        for session in sessions:
            for frame in streams[session.id]:
                session.push(frame)
        started = time.monotonic()
        for session in sessions:
            assert all(reply.error is None for reply in session.replies(60))
        wait_until(lambda: worker.metrics.checkpoints._value.get() >= 8, 30, "some are saved")
        spent = worker.metrics.checkpoint_bytes._value.get()
        # A second's worth may be saved up, and one row more be under way.
        assert spent <= 6 * MIB * (time.monotonic() - started + 1) + 2 * MIB
        oldest = worker.metrics.oldest._value.get()
        assert 0.2 < oldest < 10
        wait_until(lambda: worker.metrics.oldest._value.get() == 0, 60, "all are saved in the end")
        for session in sessions:
            cursor, done = client.redis.hmget(f"{{slotstream:0}}:slot:{session.id}", "cursor",
                                              "done")  # fmt: skip
            assert cursor == done != b"0-0"
        assert worker.metrics.checkpoints._value.get() >= 24


def test_a_large_row_handed_from_one_worker_to_another_goes_on_in_the_same_bits(
    redis_url, thread_worker, heavy
):
    streams = streams_of(3, 8, (1, 6), seed=4)
    calm = thread_worker(heavy, app="calm", slots=4, row_counts=(4,))
    with Client(redis_url, "calm") as client:
        expected = client.run(streams)
    calm.drain()
    first = thread_worker(heavy, slots=4, row_counts=(4,))
    with Client(redis_url) as client:
        sessions = client.open_many(sorted(streams), new=True)
        got = {name: [] for name in streams}
        for session in sessions:
            for frame in streams[session.id][:4]:
                session.push(frame)
            got[session.id] += list(session.replies(30))
        first.drain()
        thread_worker(heavy, slots=2, max_sessions=3, row_counts=(4,))
        for session in sessions:
            for frame in streams[session.id][4:]:
                session.push(frame)
            got[session.id] += list(session.replies(60))
    for name, replies in expected.items():
        for a, b in zip(got[name], replies, strict=True):
            np.testing.assert_array_equal(a.output, b.output)
