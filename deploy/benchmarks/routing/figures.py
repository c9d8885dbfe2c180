"""Metrics of simulations: latencies, hit rates, and ratios between routers over several seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cachetools import LRUCache

from cluster.bench.stats import estimate, mean, percentile
from deploy.benchmarks.routing.simulation import Outcome
from deploy.benchmarks.routing.worker import SALT
from router.fleet.memo import HashMemo
from worker.protocol.blocks import root_hash


class Figures(NamedTuple):
    """Metrics of one simulation's measured requests. Times are in seconds."""

    mean_ttft: float
    p50_ttft: float
    p99_ttft: float
    hit_rate: float
    """Fraction of the prompt tokens that were cached on their worker."""
    pooled_hit_rate: float = 0.0
    """Hit rate of one cache with the size of all workers' caches together; 0 if not computed."""


def figures(outcomes: Sequence[Outcome]) -> Figures:
    """Metrics of one simulation, without the pooled hit rate."""
    measured = [outcome for outcome in outcomes if outcome.arrival.measured]
    times = [outcome.first_token_s for outcome in measured]
    tokens = sum(outcome.arrival.num_tokens for outcome in measured)
    return Figures(
        mean_ttft=mean(times),
        p50_ttft=percentile(times, 50.0),
        p99_ttft=percentile(times, 99.0),
        hit_rate=sum(outcome.cached_tokens for outcome in measured) / tokens,
    )


def pooled_hit_rate(outcomes: Sequence[Outcome], page_size: int, num_pages: int) -> float:
    """Hit rate of measured prompts in one cache of `num_pages` for all workers, with LRU eviction.

    Requests arrive in the order of `outcomes`, and each one finds the prompts of all earlier ones
    in the cache. This is a reference, not a strict bound: another eviction order may have more
    hits.
    """
    cache: LRUCache[int, None] = LRUCache(num_pages)
    memo = HashMemo()
    root = root_hash(SALT)
    hit = total = 0
    for outcome in outcomes:
        arrival = outcome.arrival
        hashes = memo.hashes(arrival.tokens, page_size, root).tolist()
        found = next((n for n, value in enumerate(hashes) if value not in cache), len(hashes))
        if arrival.measured:
            hit += min(found * page_size, arrival.num_tokens - 1)
            total += arrival.num_tokens
        for value in reversed(hashes):  # so that a block is evicted before its predecessors
            cache[value] = None
    return hit / total if total else 0.0


def ratio_to_best(values: Mapping[str, Sequence[float]], own: str) -> tuple[float, float, str]:
    """Ratio of rayfleet's mean to the best other router's mean, half the width of the ratio's
    confidence interval, and the best other router's name.

    The interval is computed for the mean of the per-seed ratios.
    """
    others = {name: mean(series) for name, series in values.items() if name != own}
    best = min(others, key=lambda name: others[name])
    ratios = [a / b for a, b in zip(values[own], values[best], strict=True)]
    return mean(values[own]) / others[best], estimate(ratios).half, best
