from __future__ import annotations

import pytest

from worker.core.cache.fence import CompletedSteps
from worker.core.cache.host import HostPool
from worker.core.cache.lease import Match
from worker.core.cache.node import Node
from worker.core.scheduler.host_load_policy import HostLoadPolicy
from worker.core.step_forecast import StepForecast
from worker.protocol.host_cache import HostCachePolicy
from worker.protocol.messages import StepShape

PAGE_SIZE = 16
TOKEN_S = 1e-3


def make_policy(policy: HostCachePolicy = "auto") -> HostLoadPolicy:
    """Computing a page takes 16 ms, and more with a longer context."""
    forecast = StepForecast(1024)
    for seq in range(1, 61):
        tokens = 32 * (seq % 4)
        forecast.observe(
            StepShape(seq, tokens, tokens * tokens // 2, 4, 400), 0.002 + TOKEN_S * tokens
        )
    return HostLoadPolicy(policy, PAGE_SIZE, HostPool(64, CompletedSteps()), forecast)


def match(num_host: int = 4) -> Match:
    node = Node(None, b"", [1], [1], 1)
    return Match(node, [1], 0, node, num_host, num_alone=1)


def test_pages_are_copied_until_copies_are_measured_to_be_slower() -> None:
    policy = make_policy()
    assert policy.pays(match())
    policy.observe(4, 4 * 0.001)
    assert policy.pays(match())
    for _ in range(20):
        policy.observe(4, 4 * 0.030)
    assert not policy.pays(match())
    # Without them, nothing could be reused: 17 pages would have to be computed.
    node = Node(None, b"", [1], [1], 1)
    assert policy.pays(Match(node, [1] * 13, 0, node, 4, num_alone=0))


def test_a_slow_copy_is_eventually_retried() -> None:
    policy = make_policy()
    policy.observe(1, 0.030)
    assert not policy.pays(match())
    for _ in range(1500):
        policy.observe(0, 0.0)
    assert policy.pays(match())


def test_always_copies_at_any_cost() -> None:
    policy = make_policy("always")
    policy.observe(1, 100.0)
    assert policy.pays(match())


def test_copied_tokens_count_by_the_time_of_the_copy() -> None:
    policy = make_policy()
    policy.observe(10, 10 * 0.004)
    assert policy.cost(160) == pytest.approx(40, rel=0.2)
    for _ in range(50):
        policy.observe(10, 10.0)
    assert policy.cost(160) == 160


def test_loads_are_counted_once_they_have_ended() -> None:
    policy = make_policy()
    assert not policy.is_short(1), "unknown"
    policy.launched(1, 4)
    policy.launched(3, 10)
    policy.completed(1, 1, 0.0)
    assert not policy.is_short(1)
    policy.completed(3, 3, 4 * 0.001)  # those of Plan 1
    assert policy.is_short(1)
    assert not policy.is_short(4)
    policy.completed(4, 0, 10 * 0.001)
    assert policy.is_short(1)
