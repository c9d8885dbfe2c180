"""When requests are sent, for a given rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each of `count` requests is sent, ascending.

    Gaps are gamma distributed with shape `burstiness`: 1 is a Poisson process, less comes in
    bursts, more is steadier, and infinity makes them equal. The times are scaled so that the
    whole takes count / rate seconds, which takes the luck of the draw out of the offered rate. An
    infinite rate sends all at once.
    """
    if rate <= 0 or burstiness <= 0:
        raise ValueError("--request-rate and --burstiness must be positive")
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [(place + 1) / rate for place in range(count)]
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), count)
    times = np.cumsum(gaps)
    if count:
        times *= (count / rate) / times[-1]
    return [float(time) for time in times]


def phased_arrival_times(phases: Sequence[tuple[float, float]], seed: int) -> list[float]:
    """A Poisson process whose rate changes, ascending; phases are (seconds, requests per second).

    Every phase has as many requests as its rate says, at least one where that is above 0.
    """
    times: list[float] = []
    begin = 0.0
    for number, (seconds, rate) in enumerate(phases):
        if seconds <= 0.0 or rate < 0.0:
            raise ValueError("a phase lasts some time, and its rate is not negative")
        count = max(1, round(seconds * rate)) if rate else 0
        drawn = arrival_times(count, count / seconds, 1.0, seed + number) if count else []
        times += [begin + time for time in drawn]
        begin += seconds
    return times
