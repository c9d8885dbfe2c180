"""The gate: what it learns of costs, and that requests fall silent and come back."""

from __future__ import annotations

import random

import pytest

from worker.speculative.acceptance import RequestRecord
from worker.speculative.costs import StepCosts


@pytest.mark.parametrize("draft_ms", [0.02, 0.1])
def test_costs_are_fitted_by_size_of_batch_though_steps_are_held_up(draft_ms: float) -> None:
    rng = random.Random(1)
    costs = StepCosts()
    assert costs.rates(4) is None
    for number in range(400):
        drafts = rng.randrange(0, 9)
        held_up = 30.0 if number % 50 == 49 else 0.0
        costs.observe(4, drafts, 4 + drafts // 2, 1.0 + draft_ms * drafts + held_up)
        costs.observe(32, drafts, 32, 8.0 + 0.2 * drafts)
    rates = costs.rates(4)
    assert rates is not None
    assert rates[0] == pytest.approx(draft_ms, abs=0.03)
    assert rates[1] == pytest.approx(6 / (1.0 + 4 * draft_ms), rel=0.15)
    assert costs.rates(5) == rates, "a size that was not seen is like the one next to it"
    large = costs.rates(32)
    assert large is not None
    assert large[0] == pytest.approx(0.2, abs=0.02)


def test_a_request_whose_drafts_are_wrong_falls_silent_and_tries_again_ever_later() -> None:
    record = RequestRecord(0.5)
    for _ in range(8):
        record.observe(3, 0, 0.6)
    assert record.rate < 0.2
    assert record.gain < 0.0
    waits = []
    for _ in range(3):
        steps = 1
        while not record.is_due():
            steps += 1
        waits.append(steps)
        record.try_again(0.5)
        assert record.gain > 0.0, "it gets another chance"
        for _ in range(8):
            record.observe(3, 0, 0.6)
    assert waits == [16, 32, 64]
    record.observe(3, 2, 0.6)
    assert [record.is_due() for _ in range(16)] == [False] * 15 + [True]


def test_looks_that_find_nothing_gain_nothing() -> None:
    record = RequestRecord(0.5)
    for _ in range(20):
        record.observe(0, 0, 0.0)
    assert 0.0 < record.gain < 0.1
    assert record.rate == pytest.approx(0.8), "of drafts nothing was learnt"
