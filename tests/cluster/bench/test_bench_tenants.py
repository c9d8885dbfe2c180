"""What is made of one API key's look at another's prompts."""

from __future__ import annotations

import random

from cluster.bench.tenants import Samples, judge


def samples(gap_s: float, **seen: int) -> Samples:
    rng = random.Random(1)
    cold = [rng.gauss(0.1, 0.01) for _ in range(600)]
    warm = [rng.gauss(0.1 - gap_s, 0.01) for _ in range(600)]
    return Samples(warm_s=warm, cold_s=cold, **seen)


def failing(apart: Samples, shared: Samples) -> set[str]:
    return {check.name for check in judge(apart, shared) if not check.holds}


def test_what_cannot_be_told_apart_holds() -> None:
    assert failing(samples(0.0), samples(0.05)) == set()
    assert samples(0.05).auc() > 0.99
    assert samples(-0.05).auc() < 0.01


def test_what_shows_does_not() -> None:
    assert failing(samples(0.005), samples(0.05)) == {"auc"}
    assert failing(samples(-0.005), samples(0.05)) == {"auc"}
    assert failing(samples(0.0, foreign_tokens=1), samples(0.05)) == {"foreign_cached_tokens"}
    misses = failing(samples(0.0, own_misses=1), samples(0.05))
    assert misses == {"own_second_requests_without_a_hit"}


def test_a_blind_measurement_does_not_count() -> None:
    assert failing(samples(0.0), samples(0.0)) == {"auc_where_caches_are_shared"}
    few = Samples(warm_s=[0.1] * 10, cold_s=[0.1] * 10)
    assert failing(few, samples(0.05)) == {"num_samples"}
