"""The protocol's rules hold in every schedule of faults tried, and the search is awake."""

import pytest

from protocol_model import MUTANTS, search

SCHEDULES = 1500
SEARCHED = 400  # schedules a mutant gets, from its own first seed
# Where the rarer violations are; found again with `search(range(0, 5000), mutant, stop=True)`.
FIRST_SEED = {
    "no-epoch": 230,
    "count-unanswered-only": 750,
    "lost-keeps-trial": 1460,
    "cancel-keeps-attempts": 3680,
    "retry-unnamed": 2100,
    "reuse-unasked": 960,
    "hand-back-unfenced": 730,
}


def test_no_schedule_of_faults_violates_an_invariant():
    found, seen = search(range(SCHEDULES))
    assert found == {}
    assert seen["schedules"] == SCHEDULES
    for what in ("set aside", "retries", "end idle", "orders to shed", "drained", "parked"):
        assert seen[what] > 20, f"the search hardly met: {what}"


def test_an_innocent_session_is_set_aside_only_after_three_unlucky_trials_of_its_own():
    # The oracle raises `innocent-set-aside` otherwise; five deaths, as workers do by default.
    found, seen = search(range(200), deaths_allowed=5)
    assert found == {}
    assert seen["set aside unlucky"] <= 3


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_search_notices(mutant):
    first = FIRST_SEED.get(mutant, 0)
    found, _ = search(range(first, first + SEARCHED), mutant, stop=True)
    assert found, f"nothing noticed that {MUTANTS[mutant]}"
