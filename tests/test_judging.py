"""Who is dead: told from leases, in calm and in outages of every length, with the lease 10 s."""

from __future__ import annotations

import pytest

from slotstream_worker.judging import Judge

LEASE_S = 10.0


@pytest.fixture
def judge():
    """One that joined at 0 and has been in contact until 100."""
    judge = Judge(LEASE_S)
    judge.joined(0.0)
    judge.contact(100.0)
    return judge


def test_nobody_is_judged_before_the_time_of_a_lease():
    judge = Judge(LEASE_S)
    judge.joined(50.0)
    assert not judge.sits(59.9)
    assert judge.sits(60.1)


def test_in_calm_whoever_has_no_lease_is_dead_at_once(judge):
    assert judge.sits(100.0)
    assert judge.dead(["a", "b"], 100.0) == ["a", "b"]


@pytest.mark.parametrize("silent_s", [5.1, 60.0])
def test_after_a_long_outage_nobody_is_judged_for_a_whole_lease(judge, silent_s):
    now = 100.0 + silent_s
    judge.connected(now)
    assert not judge.sits(now + 9.9)
    assert judge.sits(now + 10.1)
    assert judge.dead(["a"], now + 10.1) == ["a"]


@pytest.mark.parametrize("silent_s", [0.0, 1.0, 4.9])
def test_after_a_short_outage_the_dead_have_had_no_lease_for_half_of_one(judge, silent_s):
    now = 100.0 + silent_s
    judge.connected(now)
    assert judge.sits(now)
    assert judge.dead(["a", "b"], now) == []
    judge.contact(now + 2.4)
    assert judge.dead(["a"], now + 2.4) == []  # b has renewed it
    assert judge.dead(["a", "b"], now + 4.9) == []
    # Patience is over, for those as well who lost theirs since.
    assert judge.dead(["a", "b", "c"], now + 5.1) == ["a", "b", "c"]


def test_outages_again_and_again_do_not_save_the_dead(judge):
    found = {}
    for tick in range(40):
        now = 100.0 + tick / 2
        judge.connected(now)  # cut twice a second
        missing = ["gone"] + (["slow"] if tick % 8 < 7 else [])  # renews every 4 s
        for worker in judge.dead(missing, now):
            found.setdefault(worker, now)
    assert found == {"gone": 105.5}
