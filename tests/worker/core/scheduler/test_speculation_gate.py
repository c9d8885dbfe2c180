"""The gate: its limits, and that requests stop drafting and resume."""

from __future__ import annotations

import pytest

from worker.config import SchedulingConfig, SpeculativeConfig
from worker.core.draft_acceptance import CommonGain, RequestRecord
from worker.core.request import Request
from worker.core.scheduler.speculation_gate import SpeculationGate
from worker.protocol.messages import Submit
from worker.protocol.sampling import SamplingParams
from worker.protocol.slo import Slo
from worker.protocol.speculation import Decision


def test_a_request_with_rejected_drafts_stops_and_retries_ever_later() -> None:
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


def test_lookups_without_drafts_gain_nothing() -> None:
    record = RequestRecord(0.8, CommonGain(), 0)
    for step in range(20):
        record.observe(0, 0, 0.0, step)
    assert 0.0 < record.gain < 0.1
    assert record.rate == pytest.approx(0.8), "no information about drafts"


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
def test_each_limit_disables_drafts(
    now: float, num_running: int, request_: Request, decision: Decision
) -> None:
    config = SpeculativeConfig(num_speculative_tokens=4, adaptive=False)
    gate = SpeculationGate(config, SchedulingConfig(max_num_seqs=10), stops_itself=True)
    gate.begin_step(num_running, num_running, now, None)
    drafts = gate.is_open and gate.num_drafts(request_) > 0
    assert drafts == (decision is Decision.DRAFT)
    assert decisions(gate) == {decision: 1 if gate.is_open else num_running}


def test_deadlines_of_later_tokens_are_evenly_spaced() -> None:
    request = make_request(slo=Slo(ttft_ms=300, tpot_ms=100))
    assert request.due_s == pytest.approx(10.3)
    request.times.first_token_s = 10.2
    request.token_ids.extend((5, 6, 7))
    assert request.due_s == pytest.approx(10.5)
