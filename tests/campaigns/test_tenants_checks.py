"""Checks of whether an API key can observe another key's prompts."""

from __future__ import annotations

import random

from tests.campaigns.tenants import Samples, judge, sooner


def samples(warm_s: float = 0.1, own_s: float = 0.05, **seen: int) -> Samples:
    rng = random.Random(1)
    cold, warm, own = ([rng.gauss(s, 0.01) for _ in range(600)] for s in (0.1, warm_s, own_s))
    return Samples(warm_s=warm, cold_s=cold, own_s=own, **seen)


def failing(found: Samples) -> set[str]:
    return {check.name for check in judge(found) if not check.holds}


def test_indistinguishable_samples_pass() -> None:
    assert failing(samples()) == set()
    assert sooner([1.0, 2.0], [3.0, 4.0]) == 1.0
    assert sooner([3.0, 4.0], [1.0, 2.0]) == 0.0
    assert sooner([1.0], [1.0]) == 0.5


def test_what_shows_does_not() -> None:
    assert failing(samples(warm_s=0.095)) == {"auc_from_a_guess"}
    assert failing(samples(warm_s=0.105)) == {"auc_from_a_guess"}
    assert failing(samples(foreign_tokens=1)) == {"foreign_cached_tokens"}
    assert failing(samples(own_misses=1)) == {"own_second_requests_without_a_hit"}


def test_a_blind_measurement_does_not_count() -> None:
    assert failing(samples(own_s=0.1)) == {"auc_of_own_prompts"}
    few = Samples(warm_s=[0.1] * 10, cold_s=[0.1] * 10, own_s=[0.05] * 20)
    assert failing(few) == {"num_samples"}
