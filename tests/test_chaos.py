"""A short form of `make chaos`."""

from __future__ import annotations

import pytest

from chaos import Chaos


@pytest.mark.crash
@pytest.mark.timeout(400)
def test_a_short_chaos_loses_repeats_and_changes_nothing():
    outcome = Chaos(11, sessions=40, rate_hz=4.0, workers=2).run(10, 120, lambda _kind, _n: None)
    assert outcome.right, outcome
    assert outcome.faults.total() >= 5
    assert outcome.frames > 400
