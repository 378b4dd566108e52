"""The futures of one server share a lock, and each is a future as any other."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, CancelledError, as_completed, wait

import pytest

from conftest import wait_until
from slotstream_worker.engine.futures import Futures


def claimed(futures: Futures, count: int):
    made = [futures.new() for _ in range(count)]
    with futures.lock:
        assert all(futures.claim(one) for one in made)
    return made


def test_results_are_given_all_at_once_and_callbacks_are_called():
    futures = Futures()
    a, b, c = claimed(futures, 3)
    seen = []
    b.add_done_callback(lambda one: seen.append((one is b, one.result())))
    assert not a.done()
    assert a.running()
    futures.resolve([a, b, c], [1, None, "three"])
    assert [one.result() for one in (a, b, c)] == [1, None, "three"]
    assert a.done()
    assert a.exception() is None
    assert seen == [(True, None)]
    with pytest.raises(RuntimeError, match=r"unexpected|invalid|RUNNING|FINISHED"):
        b.set_running_or_notify_cancel()


def test_another_futures_end_wakes_nobody_else():
    futures = Futures()
    first, second = claimed(futures, 2)
    found = []
    thread = threading.Thread(target=lambda: found.append(second.result(20)))
    thread.start()
    wait_until(lambda: futures.lock._waiters, 10, "the thread waits")
    futures.resolve([first], ["first"])
    thread.join(0.2)
    assert thread.is_alive()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        second.result(0.1)
    assert time.monotonic() - began >= 0.1
    futures.resolve([second], ["second"])
    thread.join(10)
    assert found == ["second"]


def test_cancelling_is_possible_until_it_is_claimed():
    futures = Futures()
    early, late = futures.new(), futures.new()
    assert early.cancel()
    assert not futures.claim(early)
    assert futures.claim(late)
    assert not late.cancel()
    with pytest.raises(CancelledError):
        early.result(1)
    late.set_exception(ValueError("no"))
    assert isinstance(late.exception(1), ValueError)
    with pytest.raises(ValueError, match="no"):
        late.result()


def test_the_modules_own_functions_wait_for_them():
    futures = Futures()
    made = claimed(futures, 4)
    threading.Timer(0.1, lambda: futures.resolve(made[1:2], ["one"])).start()
    done, rest = wait(made, 20, FIRST_COMPLETED)
    assert (done, len(rest)) == ({made[1]}, 3)
    threading.Timer(0.1, lambda: futures.resolve([made[0], *made[2:]], [0, 2, 3])).start()
    assert {one.result() for one in as_completed(made, 20)} == {0, "one", 2, 3}
    assert wait(made, 1, ALL_COMPLETED).not_done == set()
