"""Requests with shared prefixes, and worker failures."""

from __future__ import annotations

import numpy as np

from deploy.benchmarks.routing.workload import Arrival, FleetShape, Incident, Workload
from tests.campaigns.scale.options import ScaleOptions

_VOCAB = 100_000
_ZIPF = 0.9
_WARM = 0.25
"""Fraction of the traffic that only warms up the caches."""
_WORKERS_PER_PREFIX = 4


def scale_workload(options: ScaleOptions) -> Workload:
    """Input of the simulation, determined by the options."""
    random = np.random.default_rng(options.seed)
    count = max(1, round(options.rate * options.workers * options.duration_s))
    times = np.sort(random.uniform(0.0, options.duration_s, count))
    num_prefixes = options.num_prefixes or -(-options.workers // _WORKERS_PER_PREFIX)
    prefixes = [
        random.integers(0, _VOCAB, int(random.integers(512, 3073)), dtype="<i4").tobytes()
        for _ in range(num_prefixes)
    ]
    shares = np.arange(1, num_prefixes + 1, dtype=np.float64) ** -_ZIPF
    chosen = random.choice(num_prefixes, count, p=shares / shares.sum())
    arrivals = tuple(
        Arrival(
            request_id=f"r{number}",
            at=at,
            tokens=prefixes[prefix]
            + random.integers(0, _VOCAB, options.suffix_len, dtype="<i4").tobytes(),
            output_len=options.output_len,
            measured=at >= _WARM * options.duration_s,
        )
        for number, (at, prefix) in enumerate(zip(times.tolist(), chosen.tolist(), strict=True))
    )
    deaths = round(options.workers * options.failures_per_minute * options.duration_s / 60.0)
    victims = random.choice(options.workers, deaths, replace=False).tolist()
    return Workload(
        name="fleet",
        arrivals=arrivals,
        fleet=FleetShape(
            slowness=(options.slowness,) * options.workers, num_pages=options.num_pages
        ),
        incidents=tuple(
            Incident(at=float(random.uniform(0.0, options.duration_s)), kind="kill", worker=victim)
            for victim in victims
        ),
    )
