"""Waiting requests cost each step and each arrival little, however many there are."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.core.cache.manager import CacheManager
from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.core.scheduler.fairness import TenantService
from worker.plan.plan import StepResult
from worker.protocol.messages import Submit
from worker.protocol.sampling import SamplingParams

PREFIX = list(range(1, 4097))
"""A prompt that takes several steps."""


def scheduler(num_slots: int) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=num_slots,
        max_num_batched_tokens=512,
        max_model_len=8192,
        page_size=16,
        num_pages=20_000,
        max_queued_requests=0,
    )
    return Scheduler(config, lambda: 0.0)


def submit(number: int, prompt: list[int], tenant: str = "") -> Submit:
    sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    data = np.asarray(prompt, "<i4").tobytes()
    return Submit(
        request_id=f"q{number}", gateway_id="g", prompt=data, sampling=sampling, tenant=tenant
    )


def step(made: Scheduler) -> None:
    plan = made.schedule()
    assert plan is not None
    made.apply(StepResult(plan.seq, [7] * sum(row.num_samples for row in plan.rows), 1.0))
    made.take_report()


def test_requests_waiting_for_a_prefix_are_not_matched_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, number = scheduler(128), 100
    for i in range(number):
        made.add(submit(i, [*PREFIX, 5000 + i]))
    step(made)
    assert len(made.state.running) == 1
    looked_up = 0
    plain = CacheManager.match

    def match(*args: object, **fields: object) -> object:
        nonlocal looked_up
        looked_up += 1
        return plain(*args, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(CacheManager, "match", match)
    num_steps = 0
    while len(made.state.running) == 1:
        num_steps += 1
        step(made)
        if len(made.state.running) == 1:
            assert looked_up <= number + 2 * num_steps, "look-ups repeat while requests wait"
    assert 4 <= num_steps < 12  # they waited for the prefix, not longer
    while len(made.state.running) < number:
        step(made)
    assert made.state.stats.load.num_prefix_hits >= 0.7 * number * len(PREFIX)


def test_arrivals_charge_running_requests_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = scheduler(8)
    for i in range(8):
        made.add(submit(i, [1, 2, 3], f"t{i}"))
    for _ in range(3):
        step(made)
    charges: list[None] = []
    plain = made.state.tenants.charge_output
    monkeypatch.setattr(
        TenantService, "charge_output", lambda _, requests: charges.append(plain(requests))
    )
    for i in range(8, 108):
        made.add(submit(i, [1, 2, 3], f"t{i % 10}"))
    assert len(charges) <= 1


def test_new_tenants_take_linear_time() -> None:
    def seconds(number: int) -> float:
        service = TenantService()
        began = time.thread_time()
        for i in range(number):
            service.enter(f"t{i}")
        return time.thread_time() - began

    small = min(seconds(2000) for _ in range(3))
    large = min(seconds(16_000) for _ in range(3))
    assert large <= 24 * small  # linear: 8; quadratic: 64


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from("+-$"), st.integers(1, 100)),
        max_size=60,
    )
)
def test_a_new_tenant_is_lifted_to_the_lowest_waiting_one(
    events: list[tuple[str, str, int]],
) -> None:
    service = TenantService()
    waiting: dict[str, int] = {}
    for tenant, kind, amount in events:
        if kind == "$":
            service._charge(tenant, float(amount))
        elif kind == "-" and waiting.get(tenant):
            service.leave(tenant)
            waiting[tenant] -= 1
        elif kind == "+":
            least = min((service.served(t) for t, n in waiting.items() if n), default=None)
            before, is_new = service.served(tenant), not waiting.get(tenant)
            service.enter(tenant)
            waiting[tenant] = waiting.get(tenant, 0) + 1
            if is_new and least is not None:
                assert service.served(tenant) == max(before, least)
