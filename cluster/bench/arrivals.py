"""When requests are sent, for a given rate."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each of `count` requests is sent, ascending.

    Gaps are gamma distributed with shape `burstiness`: 1 is a Poisson process, less comes in
    bursts, more is steadier. The times are scaled so that the whole takes count / rate seconds,
    which takes the luck of the draw out of the offered rate. An infinite rate sends all at once.
    """
    if rate <= 0 or burstiness <= 0:
        raise ValueError("--request-rate and --burstiness must be positive")
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), count)
    times = np.cumsum(gaps)
    if count:
        times *= (count / rate) / times[-1]
    return [float(time) for time in times]
