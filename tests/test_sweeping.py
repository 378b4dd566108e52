"""The turn through a worker's sessions: all of them in an interval, a few at a time."""

from __future__ import annotations

from itertools import pairwise

from slotstream_worker.sweeping import SESSIONS_A_CALL, Sweep

NAMES = [f"s{k}" for k in range(1000)]


def test_a_turn_compares_each_once_and_spreads_them_over_the_interval():
    sweep = Sweep(5.0)
    assert sweep.over(100.0)
    sweep.begin(NAMES, 100.0)
    found, at = [], []
    for tick in range(500):
        now = 100.0 + tick / 100
        assert not (sweep.over(now) and len(found) < len(NAMES))
        if part := sweep.part(now):
            found += part
            at.append(now)
    assert found == NAMES
    assert len(at) == -(-len(NAMES) // SESSIONS_A_CALL)
    assert min(b - a for a, b in pairwise(at)) > 0.5
    assert at[-1] < 104.0
    assert not sweep.over(104.9)
    assert sweep.over(105.1)


def test_a_turn_that_is_late_catches_up():
    sweep = Sweep(5.0)
    sweep.begin(NAMES, 100.0)
    parts = [sweep.part(104.5) for _ in range(9)]
    assert sum(map(len, parts)) == len(NAMES)
    assert not sweep.over(104.9)


def test_a_whole_turn_waits_for_no_time():
    sweep = Sweep(5.0)
    sweep.begin(NAMES, 100.0)
    found = []
    while part := sweep.part(100.0, rest=True):
        found += part
    assert found == NAMES


def test_nothing_held_is_a_turn_too():
    sweep = Sweep(5.0)
    sweep.begin([], 100.0)
    assert sweep.part(103.0) == []
    assert not sweep.over(104.0)
    assert sweep.over(105.1)
