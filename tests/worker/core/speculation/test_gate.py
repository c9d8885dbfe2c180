"""The gate: what it learns of costs, and that requests fall silent and come back."""

from __future__ import annotations

import random

import pytest

from worker.core.request import Request
from worker.core.speculation.acceptance import CommonGain, RequestRecord
from worker.core.speculation.config import GateConfig
from worker.core.speculation.costs import DraftingTimes, StepCost, StepCosts
from worker.core.speculation.gate import SpeculationGate
from worker.wire.messages import Submit
from worker.wire.sampling import SamplingParams
from worker.wire.slo import Slo
from worker.wire.speculation import Decision


@pytest.mark.parametrize("draft_ms", [0.02, 0.1])
def test_costs_are_fitted_by_size_of_batch_though_steps_are_held_up(draft_ms: float) -> None:
    rng = random.Random(1)
    costs = StepCosts()
    assert costs.rates(4) is None
    for number in range(600):
        looks = rng.randrange(0, 5)
        drafts = sum(rng.randrange(0, 9) for _ in range(looks))
        prompts = rng.choice((0, 0, 40))
        step_ms = 1.0 + 0.2 * looks + draft_ms * drafts + 0.01 * prompts
        step_ms += 30.0 if number % 50 == 49 else 0.0
        costs.observe(StepCost(4, looks, drafts, prompts, 4 + drafts // 2, step_ms))
        size = rng.choice((30, 32, 34))
        looks = size // 2
        step_ms = 0.25 * size + 0.1 * looks + 0.2 * drafts
        costs.observe(StepCost(size, looks, drafts, 0, size, step_ms))
    rates = costs.rates(4)
    assert rates is not None
    assert rates.draft_ms == pytest.approx(draft_ms, abs=0.03)
    assert rates.look_ms == pytest.approx(0.2, abs=0.1)
    assert rates.tokens_per_ms == pytest.approx(8 / (1.4 + 8 * draft_ms), rel=0.25)
    assert costs.rates(5) == rates, "a size that was not seen is like the one next to it"
    large = costs.rates(32)
    assert large is not None
    assert large.draft_ms == pytest.approx(0.2, abs=0.03), "that rows vary counts for no draft"


def test_a_request_whose_drafts_are_wrong_falls_silent_and_tries_again_ever_later() -> None:
    record, step = RequestRecord(0.8, CommonGain(), 0), 0

    def is_wrong() -> None:
        nonlocal step
        for _ in range(8):
            step += 1
            record.observe(3, 0, -0.6, step)

    def wait() -> int:
        return next(steps for steps in range(1, 99) if record.is_due(step + steps))

    is_wrong()
    assert record.rate < 0.5
    assert record.gain < 0.0
    waits = []
    for _ in range(3):
        waits.append(wait())
        step += waits[-1]
        record.try_again(0.8, CommonGain(), step)
        assert record.gain > 0.0, "it gets another chance"
        is_wrong()
    assert waits == [4, 8, 16]
    record.observe(3, 2, 1.4, step)
    assert wait() == 4


def test_looks_that_find_nothing_gain_nothing() -> None:
    record = RequestRecord(0.8, CommonGain(), 0)
    for step in range(20):
        record.observe(0, 0, 0.0, step)
    assert 0.0 < record.gain < 0.1
    assert record.rate == pytest.approx(0.8), "of drafts nothing was learnt"


def decisions(gate: SpeculationGate) -> dict[Decision, int]:
    counted = zip(Decision, gate.totals.decisions, strict=True)
    return {decision: count for decision, count in counted if count}


def make_request(priority: int = 4, slo: Slo | None = None) -> Request:
    submit = Submit(
        request_id="a",
        gateway_id="g",
        prompt=bytes(16),
        sampling=SamplingParams(temperature=0.0, max_tokens=50, seed=0),
        priority=priority,
        slo=slo,
    )
    return Request(submit, arrival=1, arrived_s=10.0, max_total_tokens=99, eos_token_ids=())


@pytest.mark.parametrize(
    ("now", "num_running", "request_", "decision"),
    [
        (10.0, 1, make_request(), Decision.DRAFT),
        (10.0, 7, make_request(), Decision.DRAFT),
        (10.0, 8, make_request(), Decision.UTILIZATION),
        (10.0, 1, make_request(priority=6), Decision.DRAFT),
        (10.0, 1, make_request(priority=7), Decision.PRIORITY),
        (10.94, 1, make_request(slo=Slo(e2e_ms=1000)), Decision.DRAFT),
        (10.96, 1, make_request(slo=Slo(e2e_ms=1000)), Decision.DEADLINE),
        (11.01, 1, make_request(slo=Slo(e2e_ms=1000)), Decision.DRAFT),
    ],
)
def test_each_limit_keeps_drafts_out(
    now: float, num_running: int, request_: Request, decision: Decision
) -> None:
    limits = GateConfig(num_speculative_tokens=4, max_num_seqs=10, adaptive=False)
    gate = SpeculationGate(limits)
    gate.begin(num_running, num_running, now)
    drafts = gate.is_open and gate.num_drafts(request_) > 0
    assert drafts == (decision is Decision.DRAFT)
    assert decisions(gate) == {decision: 1 if gate.is_open else num_running}


def test_a_later_token_is_due_as_if_tokens_came_evenly() -> None:
    request = make_request(slo=Slo(ttft_ms=300, tpot_ms=100))
    assert request.due_s == pytest.approx(10.3)
    request.times.first_token_s = 10.2
    request.token_ids.extend((5, 6, 7))
    assert request.due_s == pytest.approx(10.5)


def test_looks_take_a_time_of_their_own_and_first_ones_another() -> None:
    times = DraftingTimes()
    for number in range(400):
        num_new = number % 3 == 0
        times.observe(1, 1, num_new, 0.1 + 0.3 * num_new)
        times.observe(32, 20, 0, 0.4)
    times.observe(1, 1, 0, 30.0)
    assert times.look_ms(1) == pytest.approx(0.1, rel=0.15)
    assert times.look_ms(32) == pytest.approx(0.02, rel=0.05)
    assert times.start_ms == pytest.approx(0.3, rel=0.15)
