"""The worker through Redis: what goes in comes out, once, in order, right."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import streams_of
from serving_models import direct, served


@pytest.fixture(scope="module")
def model():
    return served()


def test_many_sessions_through_redis_equal_their_own_direct_calls(client, thread_worker, model):
    thread_worker(model, slots=16)
    streams = streams_of(12, 9, model.frame_shape)
    replies = client.run(streams)
    for name, stream in streams.items():
        assert len(replies[name]) == 9
        assert [r.end for r in replies[name]] == [False] * 8 + [True]
        expected = direct(model, stream.reshape(-1, 6))
        for key, whole in expected.items():
            got = np.concatenate([r.output[key] for r in replies[name]])
            np.testing.assert_allclose(got, whole, rtol=1e-5, atol=1e-6)
            assert np.abs(whole.astype(float)).max() > 0.1
