"""Random operations: invariants, page contents, and outputs equal to those of requests alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.effort import IS_LONG, cases
from tests.support.worker.fake_device import Harness
from tests.support.worker.scheduler_campaign import Campaign, random_admission
from worker.protocol.page_groups import ONE_GROUP, PageGroups

OPERATIONS = 10_000 if IS_LONG else 700
WINDOWS = (
    PageGroups(num_full=1, num_window=1, window=6),
    PageGroups(num_full=0, num_window=1, window=5),
    PageGroups(num_full=2, num_window=1, window=3),
    PageGroups(num_full=2),
)

STATES = PageGroups(snapshot_pages=3), PageGroups(snapshot_pages=50)


@pytest.mark.parametrize(
    ("depth", "page_groups"),
    [(0, ONE_GROUP), (1, ONE_GROUP), (0, WINDOWS[1]), (1, WINDOWS[0]), (1, STATES[0])],
)
def test_thousands_of_operations_leak_no_page(
    depth: int, page_groups: PageGroups, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("ERROR")
    rng = random.Random(depth)
    harness = Harness(
        num_pages=23 * page_groups.num_groups + 1,
        page_groups=page_groups,
        max_num_seqs=8,
        max_num_batched_tokens=20,
    )
    campaign = Campaign(rng, harness)
    operations = [
        (60, lambda: harness.step(depth)),
        (14, campaign.submit),
        (3, campaign.abort),
        (2, campaign.evict),
        (1, campaign.unknown_requests),
        (1, campaign.replace),
        (1, campaign.change),
        (20, campaign.wait),
    ]
    weights = [weight for weight, _ in operations]
    for _ in range(OPERATIONS):
        (_, operation) = rng.choices(operations, weights)[0]
        if operation == campaign.submit and len(campaign.alive) > 30:
            campaign._forget_finished()
            operation = operations[0][1]
        operation()
    campaign.finish(depth)
    assert harness.last is not None
    assert harness.last.load.num_preemptions > OPERATIONS // 200
    # With windows or few snapshots, fewer cached prefixes can be hit.
    num_hits = sum(outcome.num_cached > 0 for outcome in harness.outcomes.values())
    assert num_hits > OPERATIONS // (200 if page_groups == ONE_GROUP else 1000)
    assert campaign.count > OPERATIONS // 20


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of operations, with up to two steps in flight at any time."""

    @initialize(
        seed=st.integers(0, 2**32),
        num_pages=st.integers(4, 24),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(1, 24),
        page_size=st.sampled_from([1, 2, 4]),
        caching=st.booleans(),
        chunked=st.booleans(),
        gap=st.sampled_from([0, 1, 3]),
        max_queued=st.sampled_from([0, 0, 2]),
        num_host_pages=st.sampled_from([0, 0, 5, 60]),
        host_cache_policy=st.sampled_from(["auto", "always"]),
        page_groups=st.sampled_from([ONE_GROUP, ONE_GROUP, *WINDOWS, *STATES]),
        max_loras=st.sampled_from([0, 0, 1, 2, 3]),
        more_copies=st.integers(0, 3),
    )
    def start(
        self,
        seed: int,
        num_pages: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        page_size: int,
        caching: bool,
        chunked: bool,
        gap: int,
        max_queued: int,
        num_host_pages: int,
        host_cache_policy: str,
        page_groups: PageGroups,
        max_loras: int,
        more_copies: int,
    ) -> None:
        self.rng = random.Random(seed)
        self.harness = Harness(
            num_pages=(num_pages - 1) * page_groups.num_groups + 1,
            page_groups=page_groups,
            max_num_seqs=min(max_num_seqs, max_num_batched_tokens),
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size,
            max_model_len=32,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            preempt_priority_gap=gap,
            max_queued_requests=max_queued,
            num_host_pages=num_host_pages if caching else 0,
            host_cache_policy=host_cache_policy,
            max_loras=max_loras,
            max_cpu_loras=max_loras + more_copies,
            **random_admission(self.rng),
        )
        self.harness.device.adapters.read_steps = lambda: self.rng.choice([0, 1, 5])
        self.campaign = Campaign(self.rng, self.harness)

    @rule(count=st.integers(1, 4))
    def submit(self, count: int) -> None:
        for _ in range(count):
            self.campaign.submit()

    @rule()
    def launch(self) -> None:
        if len(self.harness.device.in_flight) < 2:
            self.harness.schedule()

    @rule()
    def collect(self) -> None:
        if self.harness.device.in_flight:
            self.harness.apply()

    @rule(count=st.integers(1, 12), depth=st.integers(0, 1))
    def step(self, count: int, depth: int) -> None:
        for _ in range(count):
            self.harness.step(depth)

    @rule()
    def abort(self) -> None:
        self.campaign.abort()

    @rule()
    def replace(self) -> None:
        self.campaign.replace()

    @rule()
    def unknown_requests(self) -> None:
        self.campaign.unknown_requests()

    @rule()
    def change(self) -> None:
        self.campaign.change()

    @rule()
    def wait(self) -> None:
        self.campaign.wait()

    @rule()
    def evict(self) -> None:
        self.campaign.evict()

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "harness"):
            self.harness.scheduler.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "campaign"):
            self.campaign.finish(depth=1)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=cases(200),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
