"""Prompts beside decodes: as many tokens as the decodes' deadlines allow, and never none."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.support.effort import cases
from tests.support.worker.fake_device import Harness, make_submit
from worker.core.request import Request
from worker.core.scheduler.decode_slack import MAX_STALL, RESERVE, DecodeSlack
from worker.core.step_forecast import StepForecast
from worker.plan.plan import Plan
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


def make_slack(constant: float = 0.010, row: float = 0.005) -> DecodeSlack:
    """A step takes 10 ms, and 5 ms per decode."""
    forecast = StepForecast(1024)
    forecast.costs = StepCosts(
        constant=constant, prefill_token=1e-3, attended=0.0, decode_row=row, context_token=0.0
    )
    return DecodeSlack(forecast)


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
    ("now", "num_output", "tpot_ms", "expected_s"),
    [
        (0.0, 1, None, 0.095 - 0.015),  # just after the first token: the default target
        (0.3, 4, None, 0.095 - 0.015),  # on time
        (0.3, 3, None, 0.075),  # late: due now
        (0.26, 3, None, 0.035 - 0.015),  # behind, but can be met
        (0.284, 3, None, 0.0),  # only just
        (0.3, 5, None, 0.195 - 0.015),  # a token ahead
        (0.3, 40, None, MAX_STALL * 0.1 - 0.015),  # far ahead
        (0.0, 1, 40.0, 0.038 - 0.015),
        (0.0, 1, 10.0, 0.075),  # impossible, as if late
        (0.0, 1, 1000.0, 0.950 - 0.015),
        (9.0, 1, 1000.0, 0.750),
    ],
)
def test_prefill_takes_the_slack_of_a_decode(
    now: float, num_output: int, tpot_ms: float | None, expected_s: float
) -> None:
    decode = make_decode(num_output, 0.0, tpot_ms)
    assert make_slack().prefill_s([decode], now, (), 0.1) == pytest.approx(expected_s)
    resumed = make_decode(num_output, 0.0, tpot_ms, num_resumed=9)
    assert make_slack().prefill_s([resumed], now, (), 0.1) == pytest.approx(expected_s)


def test_the_least_slack_decides() -> None:
    slack, ahead = make_slack(), make_decode(9, 0.0)
    strict = make_decode(9, 0.0, 50.0)
    alone = slack.prefill_s([ahead], 0.4, (), 0.1)
    both = slack.prefill_s([ahead, strict], 0.4, (), 0.1)
    assert both == pytest.approx((9 - RESERVE) * 0.05 - 0.4 - 0.020)
    assert both < alone


def test_without_targets_there_is_no_limit() -> None:
    assert make_slack().prefill_s([make_decode(3, 0.0)], 5.0, (), 0.0) == float("inf")
    assert make_slack().prefill_s([], 5.0, (), 0.1) == float("inf")
    assert make_slack().prefill_s([make_decode(3, 0.0, 50.0)], 0.1, (), 0.0) < 1.0


def test_tokens_of_earlier_attempts_do_not_move_deadlines() -> None:
    """Regression test: a resumed request's next token was due hundreds of tokens later."""
    new, resumed = make_decode(3, 1.0, 50.0), make_decode(3, 1.0, 50.0, num_resumed=40)
    assert new.due_s == resumed.due_s == pytest.approx(1.15)


def run_timed(harness: Harness, watch: Callable[[Plan], Callable[[], None]]) -> None:
    """Steps until all requests have ended; a step takes what the device says."""
    while True:
        before = watch
        plan = harness.schedule()
        if plan is None:
            break
        check = before(plan)
        result = harness.device.run()
        harness.now += result.compute_ms / 1e3
        harness.scheduler.apply(result)
        check()
        harness.report()


@pytest.mark.parametrize("seed", range(cases(30, 10)))
def test_no_chunk_makes_a_decode_miss_a_deadline_that_it_could_meet(seed: int) -> None:
    rng = random.Random(seed)
    harness = Harness(**LIMITS, checked=False)
    harness.device.token_ms = rng.choice([0.2, 1.0])
    for number in range(22):  # so that costs are known
        harness.submit(make_submit(f"earlier{number}", [9] * (20 + 5 * number), max_tokens=4))
        run_timed(harness, lambda plan: lambda: None)
    running = harness.scheduler.state.running
    waiting = [rng.choice([30, 200, 800]) for _ in range(rng.randint(3, 8))]
    targets = [rng.choice([None, Slo(tpot_ms=20.0), Slo(tpot_ms=60.0)]) for _ in waiting]
    lengths: dict[str, list[int]] = {}

    def watch(plan: Plan) -> Callable[[], None]:
        started = harness.now
        due = []
        chunks = [row.length for row in plan.rows if row.length > 1]
        num_decodes = len(plan.rows) - len(chunks)
        decodes_s = (1.5 + num_decodes * harness.device.token_ms) / 1e3
        for request in running:
            times = request.times
            if times.first_token_s < 0.0 or not request.num_placeholders:
                continue
            target_s = 0.1 if times.slo is None else (times.slo.tpot_ms or 0.0) / 1e3
            deadline = times.token_due_s(request.num_output, target_s, 0.0)
            if deadline - started >= 1.1 * decodes_s + 1e-3:
                due.append((request.request_id, deadline))
        if num_decodes and chunks:
            lengths.setdefault("chunks", []).append(sum(chunks))

        def check() -> None:
            for name, deadline in due:
                is_least = sum(chunks) <= LEAST
                assert harness.now <= deadline or is_least, f"{name} missed its deadline"
            if waiting and rng.random() < 0.3:
                number = len(waiting)
                slo = targets[number - 1]
                prompt = [9] * waiting.pop()
                harness.submit(
                    make_submit(f"r{number}", prompt, max_tokens=30, ignore_eos=True, slo=slo)
                )

        return check

    harness.submit(make_submit("first", [9] * 8, max_tokens=150, ignore_eos=True))
    run_timed(harness, watch)
    assert not waiting
    assert min(lengths["chunks"][:-1]) >= 1
    assert len(lengths["chunks"]) <= 16 * 8 * 2, "prompts starve"
