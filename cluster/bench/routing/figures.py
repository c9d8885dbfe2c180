"""Figures of many simulations: means over seeds, their confidence, and ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from cluster.bench.routing.simulation import Outcome

# Student's t, two-sided 95 %, by degrees of freedom; beyond the table the normal value.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_NORMAL = 1.96


class Figures(NamedTuple):
    """Of one simulation; times in seconds, of measured requests only."""

    mean_ttft: float
    p50_ttft: float
    p99_ttft: float
    hit_rate: float
    """Of prompt tokens."""
    pooled_hit_rate: float = 0.0
    """What one cache as large as all workers' would have hit; 0 where that was not asked for."""


class Spread(NamedTuple):
    """A mean over seeds, and half the width of its 95 % confidence interval."""

    mean: float
    half: float


def figures(outcomes: Sequence[Outcome]) -> Figures:
    """The figures of one simulation."""
    measured = [outcome for outcome in outcomes if outcome.arrival.measured]
    times = np.array([outcome.first_token_s for outcome in measured])
    tokens = sum(outcome.arrival.num_tokens for outcome in measured)
    return Figures(
        mean_ttft=float(times.mean()),
        p50_ttft=float(np.percentile(times, 50)),
        p99_ttft=float(np.percentile(times, 99)),
        hit_rate=sum(outcome.cached_tokens for outcome in measured) / tokens,
    )


def spread(values: Sequence[float]) -> Spread:
    """Mean and confidence; of a single value nothing is known, and the half is 0."""
    if len(values) < 2:
        return Spread(fmean(values), 0.0)
    freedom = len(values) - 1
    quantile = _T95[freedom - 1] if freedom <= len(_T95) else _NORMAL
    return Spread(fmean(values), quantile * stdev(values) / len(values) ** 0.5)


def ratio_to_best(values: Mapping[str, Sequence[float]], own: str) -> tuple[float, float, str]:
    """Own mean over the best other contender's, half its interval, and that contender's name.

    Paired by seed: the interval is that of the seeds' own ratios to it.
    """
    others = {name: fmean(series) for name, series in values.items() if name != own}
    best = min(others, key=lambda name: others[name])
    ratios = [a / b for a, b in zip(values[own], values[best], strict=True)]
    return fmean(values[own]) / others[best], spread(ratios).half, best
