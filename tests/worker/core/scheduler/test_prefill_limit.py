"""Prompts next to decodes: as many tokens as the decodes' targets allow, and never none."""

from __future__ import annotations

import random
from math import inf

import pytest

from tests.support.effort import cases
from tests.support.worker.fake_device import Harness, make_submit
from worker.core.request import Request
from worker.core.scheduler.prefill_limit import LATE_PART, prefill_limit_s
from worker.protocol.slo import Slo
from worker.protocol.step_time import StepCosts

LIMITS = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "max_model_len": 1024,
    "num_pages": 8000,
    "enable_prefix_caching": False,
}
LEAST = 512 // 16
COSTS = StepCosts(
    constant=0.010, prefill_token=1e-3, attended=0.0, decode_row=0.005, context_token=1e-6
)


def make_decode(
    num_output: int, first_s: float, tpot_ms: float | None = None, num_resumed: int = 0
) -> Request:
    """A request that generated tokens here after those of an earlier attempt."""
    slo = None if tpot_ms is None else Slo(tpot_ms=tpot_ms)
    submit = make_submit("r", [7] * (4 + num_resumed), num_resumed=num_resumed, slo=slo)
    request = Request(submit, arrival=1, arrived_s=0.0, max_total_tokens=64, eos_token_ids=())
    request.token_ids.extend([7] * num_output)
    request.times.first_token_s = first_s
    return request


@pytest.mark.parametrize(
    ("targets_ms", "default_s", "expected_s"),
    [
        ([None], 0.1, 0.095 - 0.015),
        ([None, None, None], 0.1, 0.095 - 0.025),  # more decodes take longer
        ([None, 40.0], 0.1, 0.038 - 0.020),  # the smallest target limits
        ([None, 1000.0], 0.1, 0.095 - 0.020),
        ([1000.0, 500.0], 0.1, 0.475 - 0.020),  # the default is for those without a target
        ([40.0], 0.0, 0.038 - 0.015),
        ([15.5], 0.1, 0.0),  # only just
        ([15.0], 0.1, LATE_PART * 0.015),  # missed even without prefill
        ([None], 0.0, inf),
        ([], 0.1, inf),
    ],
)
def test_prefill_takes_what_decodes_leave_of_their_target(
    targets_ms: list[float | None], default_s: float, expected_s: float
) -> None:
    decodes = [make_decode(3, 0.0, target) for target in targets_ms]
    assert prefill_limit_s(decodes, COSTS, default_s) == pytest.approx(expected_s)


def test_long_contexts_of_decodes_shorten_prefills() -> None:
    decode = make_decode(3, 0.0)
    decode.num_computed = 20_000
    assert prefill_limit_s([decode], COSTS, 0.1) == pytest.approx(0.095 - 0.015 - 0.020)


def test_tokens_of_earlier_attempts_do_not_move_deadlines() -> None:
    """Regression test: a resumed request's next token was due hundreds of tokens later."""
    new, resumed = make_decode(3, 1.0, 50.0), make_decode(3, 1.0, 50.0, num_resumed=40)
    assert new.due_s == resumed.due_s == pytest.approx(1.15)


@pytest.mark.parametrize("seed", range(cases(30, 10)))
def test_no_chunk_makes_a_gap_longer_than_a_target_that_decodes_could_meet(seed: int) -> None:
    rng = random.Random(seed)
    harness = Harness(**LIMITS, checked=False)
    harness.device.token_ms = rng.choice([0.2, 1.0])
    for number in range(22):  # so that costs are known
        harness.submit(make_submit(f"earlier{number}", [9] * (20 + 5 * number), max_tokens=4))
        while harness.schedule() is not None:
            run_step(harness)
    waiting = [rng.choice([30, 200, 800]) for _ in range(rng.randint(3, 8))]
    chunks: list[int] = []
    harness.submit(make_submit("first", [9] * 8, max_tokens=150, ignore_eos=True))
    while (plan := harness.schedule()) is not None:
        lengths = [row.length for row in plan.rows]
        num_decodes, num_prompt = lengths.count(1), sum(lengths) - lengths.count(1)
        decoding = [r for r in harness.scheduler.state.running if r.num_output]
        target_s = min([0.1 if r.tpot_s == inf else r.tpot_s for r in decoding], default=inf)
        decodes_s = (1.5 + num_decodes * harness.device.token_ms) / 1e3
        seconds = run_step(harness)
        if num_decodes and num_prompt:
            chunks.append(num_prompt)
            is_missed = decodes_s >= 0.9 * target_s
            assert seconds <= 1.1 * target_s or num_prompt <= LEAST or is_missed
        if waiting and rng.random() < 0.3:
            slo = rng.choice([None, Slo(tpot_ms=20.0), Slo(tpot_ms=60.0)])
            name, prompt = f"r{len(waiting)}", [9] * waiting.pop()
            harness.submit(make_submit(name, prompt, max_tokens=30, ignore_eos=True, slo=slo))
    assert not waiting
    assert len(chunks) <= 16 * 8 * 2, "prompts starve"


def run_step(harness: Harness) -> float:
    """Runs the planned step, and advances the clock by its duration; returns that in seconds."""
    result = harness.device.run()
    seconds = result.compute_ms / 1e3
    harness.now += seconds
    harness.scheduler.apply(result)
    harness.report()
    return seconds
