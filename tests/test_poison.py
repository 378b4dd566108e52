"""A session that kills whoever runs it is set aside; nobody else loses anything."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from conftest import streams_of, wait_until
from slotstream import Client
from slotstream.cli import cli
from slotstream.operating import sessions_aside


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_a_poison_session_is_set_aside_and_can_be_retried(redis_url, worker_process):
    from click.testing import CliRunner

    streams = streams_of(6, 30, (4, 6), seed=8)
    poison = np.concatenate([streams["s3"][:5], np.full((1, 4, 6), 2e6, np.float32),
                             streams["s3"][6:9]])  # fmt: skip
    options = ("--name", "victim", "--lease", "1", "--sweep", "0.5", "--max-attempts", "4",
               "--checkpoint-interval", "0.3", "--slots", "8")  # fmt: skip
    innocents = {name: s for name, s in streams.items() if name != "s3"}
    results = {}

    def produce() -> None:
        with Client(redis_url, window=2) as client:
            results.update(client.run(innocents, timeout_s=100, rate_hz=2))

    with Client(redis_url) as client:
        session = client.open("s3")
        for frame in poison:
            session.push(frame)
        producer = threading.Thread(target=produce)
        producer.start()
        deaths = 0
        while not sessions_aside(client.app):
            process = worker_process(*options, model="serving_models:deadly")
            wait_until(
                lambda p=process: p.process.poll() is not None or sessions_aside(client.app),
                60,
                "the worker dies, or sets it aside",
            )
            deaths += process.process.poll() is not None
            assert deaths <= 8, process.text[-2000:]
        # Two in company and two alone, and those that an answer came before.
        assert deaths >= 4
        replies = list(session.replies(20))
        assert [r.error for r in replies[:5]] == [None] * 5
        last = replies[-1]
        assert last.error.code == "quarantined"
        assert (last.end, last.reason, last.cancelled) == (True, "quarantined", 3)
        producer.join(100)
        assert not producer.is_alive()
        assert all(len(r) == 30 and not any(x.error for x in r) for r in results.values())

        (found,) = sessions_aside(client.app)
        assert (found.session, found.attempts) == ("s3", "4")
        shown = CliRunner().invoke(cli, ["aside", "--redis", redis_url])
        assert "s3" in shown.output
        # Its poison entry taken out, it goes on from where it stood.
        client.redis.xdel("{slotstream:0}:aside-in:s3", found.entry)
        again = CliRunner().invoke(cli, ["retry", "s3", "--redis", redis_url])
        assert again.exit_code == 0, again.output
        assert CliRunner().invoke(cli, ["retry", "s3", "--redis", redis_url]).exit_code == 1
        attached = client.attach("s3")
        attached.end()
        went_on = list(attached.replies(30))
        assert [r.error for r in went_on] == [None] * 4
        assert went_on[-1].reason == "end"
