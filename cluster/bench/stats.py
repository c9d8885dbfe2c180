"""Statistics of measurements: percentiles, means with their intervals, paired ratios.

A figure of no values is NaN: it makes every goal fail, reads "–" in tables, and null in JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

Values = Sequence[float] | NDArray[np.float64]

LEVEL = 0.95
"""Confidence level: the part of all intervals that holds the true value."""
_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean, or a difference of means, that repeated measurements tell by Student's t."""

    value: float
    error: float
    """Standard error; NaN where there is no repetition."""
    freedom: float
    """Degrees of freedom."""

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return float(stdtrit(self.freedom, 0.5 + 0.5 * LEVEL)) * self.error

    def p_above(self, limit: float) -> float:
        """How likely so high a value would be if the true one were `limit` (one-sided)."""
        return float(stdtr(self.freedom, (limit - self.value) / max(self.error, 1e-12)))

    def p_below(self, limit: float) -> float:
        """How likely so low a value would be if the true one were `limit` (one-sided)."""
        return float(stdtr(self.freedom, (self.value - limit) / max(self.error, 1e-12)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A few repeated measurements of one thing."""

    median: float
    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    interval_low: float
    """Lower end of the mean's 95 % interval by Student's t; NaN for a single value. Of ratios the
    geometric mean is meant."""
    interval_high: float
    count: int


def percentile(values: Values, q: float) -> float:
    """The q-th percentile (0 to 100), linear between neighbours (numpy's default; type 7)."""
    if not 0.0 <= q <= 100.0:
        raise ValueError(f"a percentile lies between 0 and 100, got {q}")
    return float(np.percentile(values, q)) if len(values) else math.nan


def mean(values: Values) -> float:
    """Arithmetic mean."""
    return float(np.mean(values)) if len(values) else math.nan


def std(values: Values) -> float:
    """Population standard deviation."""
    return float(np.std(values)) if len(values) else math.nan


def share(part: float, whole: float) -> float:
    """The quotient; NaN of nothing."""
    return part / whole if whole else math.nan


def estimate(values: Values) -> Estimate:
    """The mean of independent measurements."""
    count = len(values)
    error = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return Estimate(value=mean(values), error=error, freedom=count - 1)


def difference(a: Values, b: Values) -> Estimate:
    """The mean of `b` less that of `a`, measured apart and with spreads of their own (Welch's)."""
    ours, other = estimate(b), estimate(a)
    error = math.hypot(ours.error, other.error)
    freedom = ours.freedom + other.freedom
    if error:
        terms = [(one.error / error) ** 4 / one.freedom for one in (ours, other)]
        freedom = 1.0 / sum(terms)
    return Estimate(value=ours.value - other.value, error=error, freedom=freedom)


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Pairwise quotients. Raises ValueError for unequal lengths, no data or a zero denominator."""
    if len(numerators) != len(denominators):
        raise ValueError(f"pairs needed: {len(numerators)} values against {len(denominators)}")
    if any(math.isnan(value) for value in (*numerators, *denominators)):
        raise ValueError("a round has no measurement: all of its requests failed")
    if any(value == 0 for value in denominators):
        raise ValueError("a measurement of 0 cannot be a denominator; look at the failed requests")
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def spread(values: Sequence[float]) -> Spread:
    """Median, range and interval of at least one value."""
    found = estimate(values)
    return Spread(
        median=percentile(values, 50.0),
        low=min(values),
        high=max(values),
        interval_low=found.value - found.half,
        interval_high=found.value + found.half,
        count=len(values),
    )


def spread_of_ratios(values: Sequence[float]) -> Spread:
    """Median, range and interval of ratios: that of their logarithms, which never falls below 0."""
    found = spread(values)
    if found.low <= 0.0:
        return replace(found, interval_low=math.nan, interval_high=math.nan)
    logs = spread(np.log(values).tolist())
    return replace(
        found,
        interval_low=math.exp(logs.interval_low),
        interval_high=math.exp(logs.interval_high),
    )


def bootstrap_interval(
    statistic: Callable[[Sequence[int]], float], count: int
) -> tuple[float, float]:
    """Interval of a statistic of `count` rounds: of rounds drawn anew, as numbers from 0.

    For what is no mean of rounds, such as the p99 of all their requests. Of few rounds it is too
    narrow; of one it is NaN.
    """
    if count < 2:
        return math.nan, math.nan
    picks = np.random.default_rng(0).integers(0, count, size=(_RESAMPLES, count))
    tail = 50.0 * (1.0 - LEVEL)
    low, high = np.nanpercentile([statistic(pick) for pick in picks], (tail, 100.0 - tail))
    return float(low), float(high)
