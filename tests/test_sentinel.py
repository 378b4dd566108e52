"""Behind Sentinel: the primary dies, its replica takes over, and everything goes on.

Replication is asynchronous: a primary acknowledges a write before its replica has it, so a
failover may lose the last writes. `min-replicas-to-write 1` makes a primary refuse writes while
no replica keeps up, which bounds what may be lost to what was on its way; the tests close that
last window themselves (`settle`), and then nothing may be lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from cluster import Producer, Sentinels, assert_same
from conftest import ThreadedWorker, streams_of, wait_until
from serving_models import served
from slotstream import Client
from slotstream.embedded import EmbeddedRedis
from slotstream.endpoint import Endpoint


@pytest.fixture(scope="module")
def model() -> Any:
    return served()


@pytest.fixture
def sentinels() -> Iterator[Sentinels]:
    with Sentinels({"min-replicas-to-write": 1}) as sentinels:
        yield sentinels


def calm(model: Any, streams: dict[str, Any]) -> Any:
    """The same streams through one Redis, and a worker that nothing happens to."""
    with EmbeddedRedis() as server, Client(server.url) as client:
        worker = ThreadedWorker(server.url, model, slots=len(streams)).start()
        replies = client.run(streams)
        worker.drain()
    return replies


def test_a_failover_in_the_middle_of_traffic_loses_repeats_and_changes_nothing(sentinels, model):
    streams = streams_of(16, 60, model.frame_shape, seed=8)
    url = sentinels.url
    sentinels.sentinels.pop(0).kill()  # the first that the URL names: two are enough
    settings = {"slots": 16, "checkpoint_interval_s": 0.3, "lease_s": 4.0}
    worker = ThreadedWorker(url, model, **settings).start()
    producer = Producer(url, "slotstream", streams, rate_hz=10)
    producer.start()
    wait_until(lambda: producer.counted > 16 * 10, 30, "traffic")
    sentinels.fail_over(settled=True)
    with pytest.raises(redis.ResponseError, match="NOREPLICAS"):
        sentinels.primary.call("SET", "nobody", "1")
    assert producer.is_alive()
    sentinels.bring_back()
    assert_same(producer.finish(), calm(model, streams))
    assert worker.worker.metrics.reconnects._value.get() > 0
    assert worker.worker.metrics.lost._value.get() == 0
    worker.drain()


def test_writes_wait_while_no_replica_keeps_up_and_go_on_when_one_is_back(sentinels, model, caplog):
    streams = streams_of(6, 30, model.frame_shape, seed=9)
    worker = ThreadedWorker(sentinels.url, model, slots=8).start()
    producer = Producer(sentinels.url, "slotstream", streams, rate_hz=10)
    producer.start()
    wait_until(lambda: producer.counted > 6 * 4, 30, "traffic")
    sentinels.replica.kill()
    # A frame at a time of each session may have been under way.
    settled = producer.counted + 2 * len(streams)
    wait_until(lambda: sentinels.primary.info("replication")["connected_slaves"] == "0", 10, "")
    silence = threading.Event()
    assert not silence.wait(1.0)
    assert producer.counted <= settled + 6 * 4
    assert producer.is_alive()
    counted = producer.counted
    assert not silence.wait(0.5)
    assert producer.counted == counted, "answered though nothing could be written"
    # One outage, said once: not one that seems over at each try, since it can be read.
    assert 1 <= caplog.text.count("NOREPLICAS") <= 2
    sentinels.bring_back()
    assert_same(producer.finish(), calm(model, streams))
    worker.drain()


def test_a_primary_that_no_sentinel_knows_is_an_outage_that_names_it(sentinels):
    url = sentinels.url.replace("/streams/", "/other/")
    with (
        Client(url, patience_s=0.2) as client,
        pytest.raises(redis.ConnectionError, match="no Sentinel names a primary 'other'"),
    ):
        client.config()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis+sentinel://127.0.0.1:26379", "ends with the primary's name"),
        ("redis+sentinels://127.0.0.1:26379/streams", "a Redis URL is"),
        ("redis+cluster:/127.0.0.1:6379", "a Redis URL is"),
    ],
)
def test_a_url_that_cannot_be_read_says_how_one_looks(url, said):
    with pytest.raises(ValueError, match=said):
        Endpoint(url)
