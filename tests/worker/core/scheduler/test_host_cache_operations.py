"""Random operations with a host-memory tier: nothing is leaked, and outputs are unchanged."""

from __future__ import annotations

import random

import pytest

from tests.support.effort import IS_LONG
from tests.support.worker.fake_device import Harness
from tests.support.worker.scheduler_campaign import Campaign
from worker.protocol.host_cache import HostCachePolicy, HostCacheTotals
from worker.protocol.page_groups import ONE_GROUP, PageGroups

pytestmark = pytest.mark.randomized  # with more operations
OPERATIONS = 1000 if IS_LONG else 400


def totals(harness: Harness) -> HostCacheTotals:
    assert harness.last is not None
    found = harness.last.load.host_cache
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("seed", "depth", "num_host_pages", "policy", "page_groups"),
    [
        (1, 1, 150, "always", ONE_GROUP),
        (7, 0, 10, "always", ONE_GROUP),
        (3, 1, 60, "auto", ONE_GROUP),
        (5, 1, 120, "always", PageGroups(num_full=1, num_window=1, window=6)),
        (6, 1, 90, "always", PageGroups(snapshot_pages=3)),
    ],
)
def test_hundreds_of_operations_leak_no_page_or_slot(
    seed: int,
    depth: int,
    num_host_pages: int,
    policy: HostCachePolicy,
    page_groups: PageGroups,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("ERROR")
    rng = random.Random(seed)
    harness = Harness(
        num_pages=23 * page_groups.num_groups + 1,
        page_groups=page_groups,
        max_num_seqs=8,
        max_num_batched_tokens=20,
        num_host_pages=num_host_pages,
        host_cache_policy=policy,
    )
    campaign = Campaign(rng, harness)
    harness.device.token_ms = 1.0
    loads = random.Random(seed)
    harness.device.load_time = lambda: (loads.choice([0, 1, 5]), loads.random() < 0.5)

    def change_speed() -> None:
        """Computing a page takes 4 ms."""
        harness.device.load_ms = rng.choice([1.0, 20.0])

    operations = [
        (60, lambda: harness.step(depth)),
        (14, campaign.submit),
        (3, campaign.abort),
        (2, campaign.evict),
        (1, campaign.replace),
        (1, campaign.change),
        (1, change_speed),
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
    assert harness.last.load.num_preemptions > 1
    found = totals(harness)
    assert found.num_loaded > 10
    assert harness.device.num_waiting >= 1
    assert found.num_evicted > 15
    if page_groups == ONE_GROUP:
        assert (found.num_recomputed > 3) == (policy == "auto")
    assert found.num_hit_tokens > 20
    used = found.num_stored - found.num_loaded - found.num_evicted - found.num_recomputed
    assert found.num_used == used
