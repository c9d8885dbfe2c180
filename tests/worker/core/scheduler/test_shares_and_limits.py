"""Fair share among tenants, and a queue that does not grow without bound."""

from __future__ import annotations

import pytest

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

    for _ in range(150):
        for tenant, load in (("a", 10), ("b", 1), ("c", 1)):
            for _ in range(load):
                offer(tenant)
    for _ in range(600):
        harness.step()
    waiting = {request.tenant for request in harness.scheduler.state.queue.window(10_000)}
    assert waiting == {"a", "b", "c"}, "somebody ran out of requests: shares mean nothing then"
    for (name, _), outcome in harness.outcomes.items():
        if outcome.num_cached >= 0 or outcome.tokens:
            length = len(outcome.submit.prompt) // 4
            served[name[0]] += PROMPT_WEIGHT * length + OUTPUT_WEIGHT * len(outcome.tokens)
    mean = sum(served.values()) / 3
    assert all(abs(value - mean) < 0.1 * mean for value in served.values()), served


def test_a_tenant_saves_nothing_up_while_it_sends_nothing() -> None:
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


def test_an_arrival_too_many_gets_429_and_when_to_come_again() -> None:
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


def test_a_more_urgent_arrival_sheds_the_least_urgent_that_waits() -> None:
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


def test_what_has_begun_is_never_turned_away() -> None:
    harness = Harness(max_num_seqs=1, max_queued_requests=1, max_num_batched_tokens=32)
    harness.submit(make_submit("v", [3] * 8, max_tokens=12, ignore_eos=True, priority=0))
    for _ in range(4):
        harness.step()
    harness.submit(make_submit("u", [4] * 8, max_tokens=6, ignore_eos=True, priority=9))
    harness.step()  # v waits again, and fills the queue
    assert harness.report().load.num_preemptions == 1
    harness.submit(make_submit("n", [5] * 8, max_tokens=2, ignore_eos=True, priority=8))
    moved = make_submit("m", [5] * 8, max_tokens=4, ignore_eos=True, num_resumed=2, priority=0)
    harness.submit(moved)  # another worker had begun it
    taken = make_submit("t", [5] * 8, max_tokens=4, ignore_eos=True, is_resubmitted=True)
    harness.submit(taken)  # it had waited at another worker
    harness.drain()
    for name in ("v", "u", "m", "t"):
        harness.finished(name)
    assert harness.outcomes["n", 0].rejection is not None


def test_who_comes_from_a_lost_worker_goes_before_its_class() -> None:
    harness = Harness(max_num_seqs=1, enable_prefix_caching=False)
    for name in ("running", "first", "second"):
        harness.submit(make_submit(name, [3] * 4, max_tokens=3, ignore_eos=True))
        harness.step()
    harness.submit(make_submit("moved", [4] * 4, max_tokens=3, is_resubmitted=True))
    queue = harness.scheduler.state.queue
    assert [request.request_id for request in queue.window(3)] == ["moved", "first", "second"]
    harness.drain()


def test_tokens_of_another_worker_are_charged_to_nobody() -> None:
    harness = Harness(enable_prefix_caching=False)
    moved = make_submit(
        "m", [4] * 20, max_tokens=18, ignore_eos=True, num_resumed=12, tenant="a", attempt=1
    )
    harness.submit(moved)
    harness.drain()
    assert len(harness.finished("m", 1).tokens) == 6
    served = harness.scheduler.state.tenants.served("a")
    assert served == PROMPT_WEIGHT * 20 + OUTPUT_WEIGHT * 6


def test_a_tenant_with_fewer_waiting_sheds_one_of_the_tenant_with_most() -> None:
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


def test_the_time_to_come_again_follows_the_drain_rate() -> None:
    rate = DrainRate()
    for now in (0.0, 0.001, 1.0):  # before anything was admitted
        assert rate.retry_after_s(100, 1000, now) == 1
    for i in range(400):  # ten requests of 50 tokens per second
        rate.note(50, i / 10)
    assert rate.retry_after_s(100, 0, 40.0) in (10, 11)
    assert rate.retry_after_s(0, 10_000, 40.0) in (20, 21)
    assert rate.retry_after_s(100, 0, 70.0) > 60  # it has stalled since
    assert rate.retry_after_s(10**9, 0, 70.0) == 120


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
