"""Priorities and deadlines: order, preemption, and no more preemption than necessary."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.worker.fake_device import Harness, Outcome, make_submit
from worker.core.request import Request
from worker.core.scheduler.fairness import TenantService
from worker.core.scheduler.queue import WaitingQueue
from worker.core.scheduler.slo import Urgency
from worker.core.step_forecast import StepForecast
from worker.protocol.messages import StepShape
from worker.protocol.slo import Slo


class NoForecast:
    def first_token_s(self, num_tokens: int) -> float:
        return 0.0


def prompt(length: int, family: int = 3) -> list[int]:
    return [family + i % 40 for i in range(length)]


def first_tokens(harness: Harness, depth: int = 0) -> list[str]:
    """Names in the order of their first tokens, until all work is done."""
    order: list[str] = []
    busy = True
    while busy:
        busy = harness.step(depth)
        for (name, _), outcome in harness.outcomes.items():
            if outcome.tokens and name not in order:
                order.append(name)
    return order


def test_order_is_urgency_then_deadline_then_age() -> None:
    harness = Harness(max_num_seqs=1, preempt_priority_gap=0)
    for name, options in {
        "first": {},
        "low": {"priority": 1},
        "later": {"slo": Slo(ttft_ms=9000)},
        "soon": {"slo": Slo(ttft_ms=5000)},
        "plain": {},
        "high": {"priority": 8},
    }.items():
        harness.submit(make_submit(name, prompt(4), max_tokens=2, ignore_eos=True, **options))
    assert first_tokens(harness) == ["high", "soon", "later", "first", "plain", "low"]


def test_near_its_deadline_a_request_gains_two_levels_and_loses_them_when_it_is_too_late() -> None:
    for now, expected in (
        (0.94, ["five", "late"]),
        (0.96, ["late", "five"]),
        (1.01, ["five", "late"]),
    ):
        harness = Harness(max_num_seqs=1, preempt_priority_gap=0)
        harness.submit(make_submit("late", prompt(4), max_tokens=1, slo=Slo(ttft_ms=1000)))
        harness.submit(make_submit("five", prompt(4), max_tokens=1, priority=5))
        harness.now = now
        assert first_tokens(harness) == expected


def test_the_latest_start_is_the_deadline_minus_the_predicted_time() -> None:
    class Slow:
        def first_token_s(self, num_tokens: int) -> float:
            return num_tokens * 0.1

    urgency = Urgency(0.05, Slow())
    request = new_request(make_submit("a", prompt(4), slo=Slo(ttft_ms=1000)))
    assert urgency.of_request(request, 0.0) == (4, 1.0, pytest.approx(0.55))
    assert urgency.of_request(request, 0.56) == (6, 1.0, pytest.approx(0.6))
    assert urgency.of_request(request, 0.61)[0] == 4


def test_the_forecast_learns_step_times() -> None:
    forecast = StepForecast(100)
    assert forecast.first_token_s(1000) == 0.0
    rng = random.Random(1)
    for seq in range(400):
        tokens, rows = rng.choice([0, 20, 60, 90]), rng.randint(1, 10)
        shape = StepShape(seq + 1, tokens, tokens * tokens // 2, rows, 50 * rows)
        forecast.observe(shape, 0.01 + 0.001 * tokens + 0.0005 * rows)
    forecast.observe(StepShape(500, 0, 0, 10, 500), 0.015)
    # 180 tokens with 10 decodes: two steps of 90.
    assert forecast.first_token_s(180) == pytest.approx(0.18 + 2 * 0.015, rel=0.1)


def test_the_forecast_predicts_prompt_tokens_for_a_time() -> None:
    forecast = StepForecast(1024)
    assert forecast.prompt_tokens(0.1, 0) == math.inf
    rng = random.Random(1)

    def seconds(shape: StepShape) -> float:
        return 0.01 + 1e-4 * shape.prefill_tokens + 1e-7 * shape.prefill_attended

    for seq in range(400):
        tokens, cached = rng.choice([0, 20, 300, 900]), rng.choice([0, 1000, 3000])
        attended = tokens * cached + tokens * tokens // 2
        shape = StepShape(seq + 1, tokens, attended, rng.randint(1, 10), 500)
        forecast.observe(shape, seconds(shape))
    for cached in (0, 1000, 3000):
        fitting = forecast.prompt_tokens(0.15, cached)
        attended = fitting * cached + fitting**2 / 2
        assert 1e-4 * fitting + 1e-7 * attended == pytest.approx(0.15, rel=0.05)
    assert forecast.prompt_tokens(0.0, 0) == 0.0


def test_prompts_that_are_scored_leave_room_for_fewer_tokens() -> None:
    forecast, rng = StepForecast(1024), random.Random(1)
    for seq in range(400):
        tokens, is_scored = rng.choice([0, 20, 300, 900]), rng.random() < 0.3
        attended = tokens * rng.choice([0, 1000, 3000])
        shape = StepShape(
            seq + 1, tokens, attended, rng.randint(1, 10), 500, scored_tokens=is_scored * tokens
        )
        forecast.observe(shape, 0.01 + 1e-4 * tokens + 3e-4 * shape.scored_tokens)
    assert forecast.prompt_tokens(0.15, 0) == pytest.approx(1500, rel=0.05)
    assert forecast.prompt_tokens(0.15, 0, scored=True) == pytest.approx(375, rel=0.05)


def test_waiting_time_at_the_gateway_counts() -> None:
    urgency = Urgency(0.05, NoForecast())
    submit = make_submit("a", prompt(4), slo=Slo(ttft_ms=1000), waited_ms=700)
    request = Request(submit, arrival=1, arrived_s=5.0 - 0.7, max_total_tokens=64, eos_token_ids=())
    assert urgency.of_request(request, 5.0) == (4, pytest.approx(5.3), pytest.approx(5.25))


def new_request(submit: object, arrival: int = 1) -> Request:
    return Request(
        submit,  # type: ignore[arg-type]
        arrival=arrival,
        arrived_s=0.0,
        max_total_tokens=64,
        eos_token_ids=(),
    )


@given(st.data())
def test_the_queue_stays_in_order(data: st.DataObject) -> None:
    """Against a list that is sorted again each time."""
    queue = WaitingQueue(Urgency(0.05, NoForecast()), TenantService())
    urgency = Urgency(0.05, NoForecast())
    waiting: list[tuple[Request, bool]] = []
    now = 0.0
    for arrival in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["push", "push", "back", "remove", "wait"]))
        if action in ("push", "back"):
            slo = data.draw(st.sampled_from([None, Slo(ttft_ms=200), Slo(e2e_ms=90)]))
            submit = make_submit(
                f"r{arrival}", prompt(3), priority=data.draw(st.integers(0, 9)), slo=slo
            )
            request = new_request(submit, arrival)
            request.times.arrived_s = now
            (queue.push if action == "push" else queue.push_back)(request, now)
            waiting.append((request, action == "back"))
        elif action == "remove" and waiting:
            request, _ = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            queue.remove(request)
        elif action == "wait":
            now += data.draw(st.sampled_from([0.01, 0.04, 0.1]))
        queue.tick(now)

        def place(entry: tuple[Request, bool], now: float = now) -> tuple[float, ...]:
            request, back = entry
            level, deadline, _ = urgency.of_request(request, now)
            return (-level, not back, 0 if back else deadline, request.arrival)

        expected = [request for request, _ in sorted(waiting, key=place)]
        assert queue.window(100) == expected
        assert queue.window(3) == expected[:3]
        assert queue.num_requests == len(waiting)
        assert queue.num_tokens == 3 * len(waiting)


@pytest.mark.parametrize("depth", [0, 1])
def test_an_urgent_request_preempts_and_the_victim_resumes_exactly(depth: int) -> None:
    harness = Harness(max_num_seqs=2)
    for name in ("a", "b"):
        harness.submit(make_submit(name, prompt(6), max_tokens=20, ignore_eos=True, seed=3))
    for _ in range(5):
        harness.step(depth)
    urgent = harness.submit(make_submit("u", prompt(5, 9), max_tokens=3, priority=9))
    for _ in range(2 + 2 * depth):  # a step that skips the victim, and one that runs
        harness.step(depth)
    assert urgent.tokens
    harness.drain(depth)
    for name in ("a", "b", "u"):
        harness.finished(name)
    assert harness.last is not None
    assert harness.last.load.num_preemptions == 1
    harness.check_drained()


def test_the_victim_resumes_first_in_its_class_from_the_cache() -> None:
    harness = Harness(max_num_seqs=1)
    victim = harness.submit(make_submit("v", prompt(8), max_tokens=20, ignore_eos=True))
    for _ in range(6):
        harness.step()
    for name in ("w1", "w2"):
        harness.submit(make_submit(name, prompt(4, 9), max_tokens=2, ignore_eos=True))
    harness.submit(make_submit("u", prompt(4, 5), max_tokens=2, priority=7, ignore_eos=True))
    while not harness.outcomes["u", 0].finish_reason:
        harness.step()
    plan = harness.schedule()
    assert plan is not None
    # 8 prompt tokens and 6 generated, of which 13 are computed and 12 in full pages.
    assert [(row.start, row.length) for row in plan.rows] == [(12, 2)]
    harness.apply()
    assert len(victim.tokens) == 7
    harness.drain()
    harness.finished("v")


@pytest.mark.parametrize("gap", [1, 3])
def test_a_gap_too_small_preempts_no_request(gap: int) -> None:
    harness = Harness(max_num_seqs=1, preempt_priority_gap=gap)
    harness.submit(make_submit("a", prompt(4), max_tokens=8, ignore_eos=True))
    harness.step()
    harness.submit(make_submit("b", prompt(4), max_tokens=2, priority=3 + gap, ignore_eos=True))
    harness.step()
    harness.drain()
    assert harness.last is not None
    assert harness.last.load.num_preemptions == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_equals_never_ping_pong_even_near_their_deadlines(depth: int) -> None:
    harness = Harness(max_num_seqs=2, preempt_priority_gap=3)
    slo = Slo(ttft_ms=100, e2e_ms=500)
    for i in range(8):
        harness.submit(make_submit(f"r{i}", prompt(6, i), max_tokens=12, ignore_eos=True, slo=slo))
    while harness.step(depth):
        harness.now += 0.01
    harness.report()
    for i in range(8):
        harness.finished(f"r{i}")
    assert harness.last is not None
    assert harness.last.load.num_preemptions == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stream_of_urgent_requests_does_not_thrash_the_others(depth: int) -> None:
    """After each preemption, a victim must get further before the next one."""
    harness = Harness(max_num_seqs=2, max_num_batched_tokens=64)
    for name in ("a", "b"):
        harness.submit(make_submit(name, prompt(8), max_tokens=40, ignore_eos=True))
    harness.step(depth)
    count = steps = 0
    while not all(harness.outcomes[name, 0].finish_reason for name in ("a", "b")):
        if [request.request_id for request in harness.scheduler.state.running] == ["a", "b"]:
            count += 1
            harness.submit(make_submit(f"u{count}", prompt(4, 9), max_tokens=1, priority=9))
        harness.step(depth)
        steps += 1
        assert steps < 1000, "no progress"
    harness.drain(depth)
    harness.finished("a")
    harness.finished("b")
    assert harness.last is not None
    # 40 tokens each; a victim may be preempted after 1 or more, then 4, 8, 16 and 32 more.
    assert 4 < harness.last.load.num_preemptions <= 2 * 5


def test_pages_and_slots_are_preempted_but_never_in_vain() -> None:
    harness = Harness(max_num_seqs=8, num_pages=17, max_num_batched_tokens=64)
    harness.submit(make_submit("a", prompt(24), max_tokens=20, ignore_eos=True, priority=0))
    harness.submit(make_submit("b", prompt(24, 9), max_tokens=20, ignore_eos=True, priority=0))
    harness.step()
    urgent = harness.submit(make_submit("u", prompt(16, 5), max_tokens=4, priority=9))
    harness.step()
    assert urgent.tokens
    assert len(list(harness.scheduler.state.running)) == 2
    harness.drain()
    for name in ("a", "b", "u"):
        harness.finished(name)


def test_no_request_is_preempted_if_that_admits_none() -> None:
    harness = Harness(max_num_seqs=8, num_pages=17, max_num_batched_tokens=64)
    harness.submit(make_submit("h", prompt(40), max_tokens=12, ignore_eos=True, priority=8))
    harness.submit(make_submit("l", prompt(8, 9), max_tokens=12, ignore_eos=True, priority=0))
    harness.step()
    harness.submit(make_submit("u", prompt(40, 5), max_tokens=4, priority=9))
    harness.step()
    assert harness.report().load.num_preemptions == 0
    harness.drain()
    harness.finished("u")


def test_the_cheapest_to_resume_is_preempted() -> None:
    harness = Harness(
        max_num_seqs=2, max_num_batched_tokens=64, page_size=8, enable_prefix_caching=False
    )
    harness.submit(make_submit("short", prompt(4), max_tokens=20, ignore_eos=True))
    harness.submit(make_submit("long", prompt(30, 9), max_tokens=20, ignore_eos=True))
    harness.step()
    harness.submit(make_submit("u", prompt(4, 5), max_tokens=2, priority=9, ignore_eos=True))
    harness.step()
    running = [request.request_id for request in harness.scheduler.state.running]
    assert running == ["u", "long"]
    harness.drain()
    harness.finished("short")


def test_an_urgent_burst_is_served_together() -> None:
    harness = Harness(max_num_seqs=4, max_num_batched_tokens=64)
    for i in range(4):
        harness.submit(make_submit(f"b{i}", prompt(4, i), max_tokens=30, ignore_eos=True))
    for _ in range(3):
        harness.step(1)
    urgent: list[Outcome] = [
        harness.submit(make_submit(f"u{i}", prompt(4, 20 + i), max_tokens=2, priority=9))
        for i in range(4)
    ]
    for _ in range(4):
        harness.step(1)
    assert all(outcome.tokens for outcome in urgent)
    harness.drain(1)


def test_random_urgencies_change_no_output() -> None:
    rng = random.Random(3)
    harness = Harness(
        num_pages=40,
        max_num_seqs=5,
        max_num_batched_tokens=24,
        prefill_admission_policy="pack",
    )
    for i in range(400):
        if rng.random() < 0.8:
            slo = Slo(ttft_ms=rng.choice([20.0, 100.0])) if rng.random() < 0.4 else None
            harness.submit(
                make_submit(
                    f"r{i}",
                    prompt(rng.randint(1, 30), rng.randrange(4)),
                    max_tokens=rng.randint(1, 12),
                    priority=rng.choice([0, 4, 9]),
                    slo=slo,
                )
            )
        harness.now += 0.01
        harness.step(1)
    harness.drain(1)
    for name, _ in list(harness.outcomes):
        harness.finished(name)
    assert harness.last is not None
    assert harness.last.load.num_preemptions > 10
    harness.check_drained()
