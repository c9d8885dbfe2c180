"""Statistics of measurements: percentiles, paired ratios, and how far they can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A few repeated measurements of one thing."""

    median: float
    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    interval_low: float
    """Lower end of the median's 95 % bootstrap interval."""
    interval_high: float
    count: int


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), linear between neighbours; 0 for no values."""
    if not 0.0 <= q <= 100.0:
        raise ValueError(f"a percentile lies between 0 and 100, got {q}")
    return float(np.percentile(values, q)) if len(values) else 0.0


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; 0 for no values."""
    return float(np.mean(values)) if len(values) else 0.0


def std(values: Sequence[float]) -> float:
    """Population standard deviation; 0 for no values."""
    return float(np.std(values)) if len(values) else 0.0


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Pairwise quotients. Raises ValueError for unequal lengths or a zero denominator."""
    if len(numerators) != len(denominators):
        raise ValueError(f"pairs needed: {len(numerators)} values against {len(denominators)}")
    if any(value == 0 for value in denominators):
        raise ValueError("a measurement of 0 cannot be a denominator; look at the failed requests")
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile-bootstrap interval of the median; the same seed gives the same interval."""
    if not len(values):
        raise ValueError("an interval needs at least one value")
    rng = np.random.default_rng(seed)
    data = np.asarray(values, dtype=np.float64)
    picks = rng.integers(0, len(data), size=(RESAMPLES, len(data)))
    medians = np.median(data[picks], axis=1)
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(medians, [tail, 1.0 - tail])
    return float(low), float(high)


def spread(values: Sequence[float], *, seed: int = 0) -> Spread:
    """Median, range and bootstrap interval of at least one value."""
    low, high = bootstrap_interval(values, seed=seed)
    return Spread(
        median=float(np.median(values)),
        low=min(values),
        high=max(values),
        interval_low=low,
        interval_high=high,
        count=len(values),
    )
