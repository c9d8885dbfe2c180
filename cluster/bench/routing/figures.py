"""Figures of many simulations: means over seeds, their confidence, and ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cachetools import LRUCache

from cluster.bench.routing.simulation import Outcome
from cluster.bench.routing.worker import SALT
from cluster.bench.stats import estimate, mean, percentile
from router.fleet.memo import HashMemo
from worker.wire.blocks import root_hash


class Figures(NamedTuple):
    """The figures of one simulation; times in seconds, of measured requests only."""

    mean_ttft: float
    p50_ttft: float
    p99_ttft: float
    hit_rate: float
    """Part of the prompt tokens that were in a cache."""
    pooled_hit_rate: float = 0.0
    """Hit rate of one cache as large as all workers' together; 0 where that was not asked for."""


def figures(outcomes: Sequence[Outcome]) -> Figures:
    """The figures of one simulation."""
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
    """Share of the measured prompts' tokens in one pooled cache with least-recently-used eviction.

    Requests come in the order of `outcomes`; each finds what all before it have computed. A mark
    to compare with rather than a strict bound: another order of eviction may hit more.
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
        for value in reversed(hashes):  # so that leaves are evicted before what they follow
            cache[value] = None
    return hit / total if total else 0.0


def ratio_to_best(values: Mapping[str, Sequence[float]], own: str) -> tuple[float, float, str]:
    """Own mean over the best other router's, half its interval, and that router's name.

    Paired by seed: the interval is that of the seeds' own ratios to it.
    """
    others = {name: mean(series) for name, series in values.items() if name != own}
    best = min(others, key=lambda name: others[name])
    ratios = [a / b for a, b in zip(values[own], values[best], strict=True)]
    return mean(values[own]) / others[best], estimate(ratios).half, best
