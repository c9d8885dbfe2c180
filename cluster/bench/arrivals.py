"""Arrival times of requests at a given rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Arrival times of `count` requests in seconds after the start, ascending.

    Intervals are gamma distributed with shape `burstiness`, as in vLLM: 1 is a Poisson process,
    lower values are burstier, higher ones are more uniform, and infinity makes all intervals equal.
    Times are scaled so that the last is count / rate, independent of the samples. At an infinite
    rate, all are 0.

    Raises:
        ValueError: the rate or the burstiness is not positive.
    """
    if rate <= 0 or burstiness <= 0:
        raise ValueError(
            "--request-rate and --burstiness must be greater than 0, got "
            f"{rate:g} and {burstiness:g}"
        )
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [(index + 1) / rate for index in range(count)]
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), count)
    times = np.cumsum(gaps)
    if count:
        times *= (count / rate) / times[-1]
    return [float(time) for time in times]


def phased_arrival_times(phases: Sequence[tuple[float, float]], seed: int) -> list[float]:
    """Arrival times in seconds, ascending, of a Poisson process with phases of different rates.

    A phase has seconds * rate requests, rounded, but at least one if its rate is above 0.

    Args:
        phases: length in seconds and requests per second of each phase.
        seed: seed of the intervals.

    Raises:
        ValueError: a phase has no duration, or a negative rate.
    """
    times: list[float] = []
    begin = 0.0
    for number, (seconds, rate) in enumerate(phases):
        if seconds <= 0.0 or rate < 0.0:
            raise ValueError(
                "phases must have a duration greater than 0 and a rate of at least 0, got "
                f"{seconds:g} s "
                f"at {rate:g} requests/s"
            )
        count = max(1, round(seconds * rate)) if rate else 0
        arrivals = arrival_times(count, count / seconds, 1.0, seed + number) if count else []
        times += [begin + time for time in arrivals]
        begin += seconds
    return times
