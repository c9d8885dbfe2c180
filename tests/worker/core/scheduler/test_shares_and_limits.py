"""Fair sharing between tenants, and a bounded queue."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.worker.fake_device import Harness, make_submit
from worker.core.scheduler.fairness import OUTPUT_WEIGHT, PROMPT_WEIGHT
from worker.core.scheduler.overload import DrainRate


@pytest.mark.parametrize("policy", ["fifo", "pack"])
def test_three_tenants_at_ten_to_one_to_one_get_equal_service(policy: str) -> None:
    harness = Harness(
        checked=False,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        num_pages=200,
        enable_prefix_caching=False,
        prefill_admission_policy=policy,
    )
    served = {"a": 0.0, "b": 0.0, "c": 0.0}
    count = 0

    def offer(tenant: str) -> None:
        nonlocal count
        count += 1
        # The heavy tenant's requests are larger as well.
        length, out = (24, 16) if tenant == "a" else (8, 12)
        harness.submit(
            make_submit(
                f"{tenant}{count}", [3] * length, max_tokens=out, ignore_eos=True, tenant=tenant
            )
        )

    for _ in range(75):
        for tenant, load in (("a", 10), ("b", 1), ("c", 1)):
            for _ in range(load):
                offer(tenant)
    for _ in range(300):
        harness.step()
    waiting = {request.tenant for request in harness.scheduler.state.queue.window(10_000)}
    assert waiting == {"a", "b", "c"}, "a tenant ran out of requests: shares are meaningless"
    for (name, _), outcome in harness.outcomes.items():
        if outcome.num_cached >= 0 or outcome.tokens:
            length = len(outcome.submit.prompt) // 4
            served[name[0]] += PROMPT_WEIGHT * length + OUTPUT_WEIGHT * len(outcome.tokens)
    mean = sum(served.values()) / 3
    assert all(abs(value - mean) < 0.1 * mean for value in served.values()), served


def test_an_idle_tenant_saves_up_no_service() -> None:
    harness = Harness(max_num_seqs=1, enable_prefix_caching=False)
    for i in range(30):
        harness.submit(make_submit(f"a{i}", [3] * 4, max_tokens=4, ignore_eos=True, tenant="a"))
    for _ in range(40):
        harness.step()
    for i in range(10):
        harness.submit(make_submit(f"b{i}", [3] * 4, max_tokens=4, ignore_eos=True, tenant="b"))
    ends: list[str] = []
    for _ in range(40):
        harness.step()
        done = [k[0] for k, o in harness.outcomes.items() if o.finish_reason and k[0] not in ends]
        ends += done
    since = [name[0] for name in ends[-8:]]
    assert since.count("b") in (3, 4, 5), ends


def test_an_arrival_beyond_the_limit_gets_429_with_retry_after() -> None:
    harness = Harness(max_num_seqs=1, max_queued_requests=2)
    outcomes = [
        harness.submit(make_submit(f"r{i}", [3] * 4, max_tokens=8, ignore_eos=True))
        for i in range(5)
    ]
    harness.report()
    assert [outcome.finish_reason for outcome in outcomes] == [None] * 3 + ["error"] * 2
    rejection = outcomes[3].rejection
    assert rejection is not None
    assert rejection.status == 429
    assert rejection.retry_after_s >= 1
    assert (rejection.request_id, rejection.attempt) == ("r3", 0)
    harness.drain()
    for i in range(3):
        harness.finished(f"r{i}")
    harness.check_drained()


def test_a_more_urgent_arrival_sheds_the_least_urgent_waiting_request() -> None:
    harness = Harness(max_num_seqs=1, max_queued_requests=2, preempt_priority_gap=0)
    harness.submit(make_submit("running", [3] * 4, max_tokens=8, ignore_eos=True))
    harness.step()
    for name, priority in (("low", 2), ("mid", 4), ("other", 2), ("high", 7), ("higher", 8)):
        harness.submit(make_submit(name, [3] * 4, max_tokens=2, priority=priority))
    harness.report()
    ended = {key[0] for key, o in harness.outcomes.items() if o.rejection is not None}
    assert ended == {"low", "other", "mid"}
    harness.drain()
    for name in ("running", "high", "higher"):
        harness.finished(name)


def test_tokens_are_bounded_too_and_one_request_may_be_larger() -> None:
    harness = Harness(max_num_seqs=1, max_queued_tokens=20, num_pages=65)
    harness.submit(make_submit("running", [3] * 4, max_tokens=8, ignore_eos=True))
    harness.step()
    sizes = {"large": 30, "second": 4}
    for name, size in sizes.items():
        harness.submit(make_submit(name, [3] * size, max_tokens=1))
    harness.report()
    assert harness.outcomes["large", 0].rejection is None
    assert harness.outcomes["second", 0].rejection is not None
    harness.drain()
    harness.finished("large")


def test_started_requests_are_never_rejected() -> None:
    harness = Harness(max_num_seqs=1, max_queued_requests=1, max_num_batched_tokens=32)
    harness.submit(make_submit("v", [3] * 8, max_tokens=12, ignore_eos=True, priority=0))
    for _ in range(4):
        harness.step()
    harness.submit(make_submit("u", [4] * 8, max_tokens=6, ignore_eos=True, priority=9))
    harness.step()  # v waits again, and fills the queue
    assert harness.report().load.num_preemptions == 1
    harness.submit(make_submit("n", [5] * 8, max_tokens=2, ignore_eos=True, priority=8))
    moved = make_submit("m", [5] * 8, max_tokens=4, ignore_eos=True, num_resumed=2, priority=0)
    harness.submit(moved)  # another worker had started it
    taken = make_submit("t", [5] * 8, max_tokens=4, ignore_eos=True, is_resubmitted=True)
    harness.submit(taken)  # it had waited at another worker
    harness.drain()
    for name in ("v", "u", "m", "t"):
        harness.finished(name)
    assert harness.outcomes["n", 0].rejection is not None


def test_resubmitted_requests_come_first_in_their_class() -> None:
    harness = Harness(max_num_seqs=1, enable_prefix_caching=False)
    for name in ("running", "first", "second"):
        harness.submit(make_submit(name, [3] * 4, max_tokens=3, ignore_eos=True))
        harness.step()
    harness.submit(make_submit("moved", [4] * 4, max_tokens=3, is_resubmitted=True))
    queue = harness.scheduler.state.queue
    assert [request.request_id for request in queue.window(3)] == ["moved", "first", "second"]
    harness.drain()


def test_tokens_of_another_worker_are_not_charged() -> None:
    harness = Harness(enable_prefix_caching=False)
    moved = make_submit(
        "m", [4] * 20, max_tokens=18, ignore_eos=True, num_resumed=12, tenant="a", attempt=1
    )
    harness.submit(moved)
    harness.drain()
    assert len(harness.finished("m", 1).tokens) == 6
    served = harness.scheduler.state.tenants.served("a")
    assert served == PROMPT_WEIGHT * 20 + OUTPUT_WEIGHT * 6


def test_a_tenant_with_fewer_requests_sheds_one_of_a_tenant_with_more() -> None:
    harness = Harness(max_num_seqs=1, max_queued_requests=4)
    harness.submit(make_submit("running", [3] * 4, max_tokens=8, ignore_eos=True))
    harness.step()
    for i in range(4):
        harness.submit(make_submit(f"a{i}", [3] * 4, max_tokens=1, tenant="a"))
    for i in range(3):
        harness.submit(make_submit(f"b{i}", [3] * 4, max_tokens=1, tenant="b"))
    harness.report()
    ended = {key[0] for key, o in harness.outcomes.items() if o.rejection is not None}
    assert ended == {"a3", "a2", "b2"}
    harness.drain()


def drain(rate: DrainRate, begin: float, seconds: float, per_s: int = 10, tokens: int = 50) -> None:
    """A backlog of this duration, which this many requests leave per second."""
    rate.tick(begin, is_waiting=True)
    for i in range(1, round(seconds * per_s) + 1):
        rate.note(tokens)
        rate.tick(begin + i / per_s, is_waiting=True)


def test_retry_after_follows_the_drain_rate() -> None:
    rate = DrainRate()
    assert rate.retry_after_s(100, 1000) == 1  # no information yet
    drain(rate, 0.0, 40.0)
    assert rate.retry_after_s(100, 0) in (10, 11)
    assert rate.retry_after_s(10, 10_000) in (20, 21)
    rate.tick(70.0, is_waiting=True)
    assert rate.retry_after_s(100, 0) > 60  # it has stalled
    assert rate.retry_after_s(10**9, 0) == 120


def test_a_new_backlog_is_not_a_stall() -> None:
    """No request has left it initially, since all slots are taken."""
    rate = DrainRate()
    rate.tick(0.0, is_waiting=True)
    rate.tick(0.02, is_waiting=True)
    assert rate.retry_after_s(100, 50_000) <= 2


def test_requests_with_free_slots_are_not_a_backlog() -> None:
    """64 start immediately, then two per second: a queue of 100 takes 50 s."""
    rate = DrainRate()
    for _ in range(64):
        rate.note(50)
    drain(rate, 0.0, 30.0, per_s=2)
    assert 45 <= rate.retry_after_s(100, 5_000) <= 50


@given(
    seed=st.integers(0, 2**32),
    pauses=st.lists(st.floats(0.0, 1e5), min_size=1, max_size=5),
    aborted=st.booleans(),
)
def test_idle_time_between_busy_periods_changes_no_estimate(
    seed: int, pauses: list[float], aborted: bool
) -> None:
    def estimates(pauses: list[float]) -> list[int]:
        rng, rate, now, found = Random(seed), DrainRate(), 0.0, []
        for pause in pauses:
            seconds, per_s = rng.choice([0.5, 3.0, 20.0]), rng.choice([1, 10, 50])
            drain(rate, now, seconds, per_s)
            now += seconds
            if not aborted:
                rate.tick(now, is_waiting=False)
            now += pause
            rate.end_backlog()
            found.append(rate.retry_after_s(100, 5_000))
        return found

    # Rounding of late times may move a whole second.
    assert estimates(pauses) == pytest.approx(estimates([0.0] * len(pauses)), abs=1)


def test_a_burst_after_an_idle_minute_gets_the_right_retry_after() -> None:
    def retry_after_s(idle_s: float) -> set[int]:
        harness = Harness(max_num_seqs=4, max_queued_requests=20)
        for name in ("before", "after"):
            for i in range(40):
                request = make_submit(f"{name}{i}", [3] * 4, max_tokens=4, ignore_eos=True)
                harness.submit(request)
            harness.report()
            rejections = [o.rejection for o in harness.outcomes.values() if o.rejection]
            harness.drain()
            harness.now += idle_s
        return {r.retry_after_s for r in rejections[-10:]}

    assert retry_after_s(0.0) == retry_after_s(60.0)


def test_loads_report_how_full_the_queue_is() -> None:
    harness = Harness(max_num_seqs=1, preempt_priority_gap=0)
    for priority in (4, 6, 5):
        harness.submit(make_submit(f"p{priority}", [3] * 4, priority=priority, max_tokens=4))
    harness.step()
    assert harness.last is not None
    load = harness.last.load
    assert (load.num_waiting, load.num_queued_tokens, load.least_queued_priority) == (2, 8, 4)
    assert load.retry_after_s >= 1
    harness.drain()
    assert harness.last.load.least_queued_priority == -1
    assert harness.last.load.retry_after_s == 0
