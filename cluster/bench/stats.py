"""Statistics of measurements: percentiles, means with confidence intervals, paired ratios.

Statistics of empty data are NaN: checks fail, tables show "–", and JSON has null.
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
"""Level of confidence intervals."""
_RESAMPLES = 2000
"""Number of bootstrap samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Estimate of a mean, or of a difference of means, with a Student's t confidence interval."""

    value: float
    error: float
    """Standard error; NaN for a single measurement."""
    freedom: float
    """Degrees of freedom."""

    @property
    def half(self) -> float:
        """Half-width of the confidence interval."""
        return float(stdtrit(self.freedom, 0.5 + 0.5 * LEVEL)) * self.error

    def p_above(self, limit: float) -> float:
        """One-sided p-value: probability of an estimate of at least `value` if the true value is
        `limit`."""
        return float(stdtr(self.freedom, (limit - self.value) / max(self.error, 1e-12)))

    def p_below(self, limit: float) -> float:
        """One-sided p-value: probability of an estimate of at most `value` if the true value is
        `limit`."""
        return float(stdtr(self.freedom, (self.value - limit) / max(self.error, 1e-12)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Summary of repeated measurements of one quantity."""

    median: float
    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    interval_low: float
    """Lower end of the 95 % confidence interval of the mean (for ratios: the geometric mean), by
    Student's t; NaN for a single value."""
    interval_high: float
    """Upper end of the confidence interval (see `interval_low`)."""
    count: int
    """Number of values."""


def percentile(values: Values, q: float) -> float:
    """The q-th percentile (0 to 100), interpolated linearly (numpy's default; type 7)."""
    if not 0.0 <= q <= 100.0:
        raise ValueError(f"percentiles must be in [0, 100], got {q}")
    return float(np.percentile(values, q)) if len(values) else math.nan


def mean(values: Values) -> float:
    """Arithmetic mean; NaN if there are no values."""
    return float(np.mean(values)) if len(values) else math.nan


def std(values: Values) -> float:
    """Population standard deviation; NaN if there are no values."""
    return float(np.std(values)) if len(values) else math.nan


def share(part: float, whole: float) -> float:
    """Ratio of a part to the whole; NaN if the whole is 0."""
    return part / whole if whole else math.nan


def estimate(values: Values) -> Estimate:
    """Estimate of the mean of independent measurements."""
    count = len(values)
    error = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return Estimate(value=mean(values), error=error, freedom=count - 1)


def difference(a: Values, b: Values) -> Estimate:
    """Estimate of mean(b) - mean(a) for unpaired samples of unequal variance (Welch's t)."""
    means = estimate(a), estimate(b)
    error = math.hypot(*(sample.error for sample in means))
    freedom = sum(sample.freedom for sample in means)
    if error:
        freedom = 1.0 / sum((sample.error / error) ** 4 / sample.freedom for sample in means)
    return Estimate(value=means[1].value - means[0].value, error=error, freedom=freedom)


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Pairwise quotients. Raises ValueError for unequal lengths, NaN or a zero denominator."""
    if len(numerators) != len(denominators):
        raise ValueError(
            f"ratios need pairs of values, got {len(numerators)} and {len(denominators)} values"
        )
    if any(math.isnan(value) for value in (*numerators, *denominators)):
        raise ValueError("a round has no measurement, since all of its requests failed")
    if any(value == 0 for value in denominators):
        raise ValueError(
            "cannot compute a ratio, since a measurement of the baseline is 0: check its failed "
            "requests"
        )
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def spread(values: Sequence[float]) -> Spread:
    """Median, range, and confidence interval of the mean, for at least one value."""
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
    """Median, range, and confidence interval of the geometric mean (NaN if a ratio is 0)."""
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
    """Percentile bootstrap interval of a statistic over rounds.

    It applies to statistics that are not a mean of the rounds' values, such as the p99 of all their
    requests. With few rounds, the interval is too narrow.

    Args:
        statistic: function of the indices of the sampled rounds, which may repeat.
        count: number of rounds.

    Returns:
        Lower and upper end; NaN for fewer than two rounds.
    """
    if count < 2:
        return math.nan, math.nan
    samples = np.random.default_rng(0).integers(0, count, size=(_RESAMPLES, count))
    tail = 50.0 * (1.0 - LEVEL)
    low, high = np.nanpercentile([statistic(sample) for sample in samples], (tail, 100.0 - tail))
    return float(low), float(high)
