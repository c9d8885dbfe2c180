"""Traffic of scenarios: arrival times, lengths, shared prefixes and priorities of requests.

Prompts are random tokens with log-normal lengths; most start with one of a set of shared prefixes.
Equal seeds give equal traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.bench.arrivals import phased_arrival_times
from cluster.bench.datasets import Ids
from cluster.bench.jobs.scenario_options import ScenarioName

DEFAULT_PRIORITY = 4
URGENT = 7
"""Minimum priority of urgent requests."""
BURST_RISE = 40.0
"""Ratio of a burst's peak rate to the rate before and after."""
_MIX = ((9, 0.05), (7, 0.05), (4, 0.6), (1, 0.3))
"""Priorities of mixed traffic, with their fractions of the requests."""
_SLO_FACTORS = ((URGENT, 6.0), (DEFAULT_PRIORITY, 15.0), (0, 60.0))
"""TTFT SLOs by minimum priority, as multiples of an idle fleet's p99."""
_LOADS: dict[ScenarioName, float] = {
    "steady": 0.6,
    "burst": 2.0,
    "mixed_priority": 1.3,
    "long_short": 0.6,
}
"""Peak rate of each scenario, as a multiple of the sustainable rate."""
_PREFIX_SEED = 77


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Log-normal distribution of lengths in tokens, clamped to `minimum` and `maximum`."""

    median: float
    sigma: float
    minimum: int
    maximum: int

    def sample(self, rng: np.random.Generator) -> int:
        """A random length."""
        length = self.median * np.exp(self.sigma * rng.standard_normal())
        return int(min(max(length, self.minimum), self.maximum))


PROMPTS = Lengths(median=64, sigma=0.8, minimum=8, maximum=768)
OUTPUTS = Lengths(median=32, sigma=0.5, minimum=8, maximum=128)
_LONG_PROMPTS = Lengths(median=1024, sigma=0.3, minimum=512, maximum=2048)
_LONG_PART = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Shared prefixes of prompts."""

    part: float = 0.6
    """Fraction of requests with a shared prefix."""
    count: int = 96
    """Number of prefixes. With the benchmark's default engine, they fill the cache of one worker,
    or half the caches of two: hits depend on which worker caches which prefix."""
    lengths: Lengths = Lengths(median=320, sigma=0.3, minimum=64, maximum=640)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A planned request."""

    index: int
    arrival_s: float
    """Seconds from the start to sending."""
    prompt: list[int]
    """Token IDs."""
    output_len: int
    """Number of tokens to generate."""
    priority: int
    slo_factor: float
    """TTFT SLO, as a multiple of an idle fleet's p99."""


def phases(scenario: ScenarioName, rps: float, duration: float) -> list[tuple[float, float]]:
    """Seconds and requests per second of each phase of a scenario whose peak rate is `rps`."""
    if scenario != "burst":
        return [(duration, rps)]
    calm = rps / BURST_RISE
    return [(0.4 * duration, calm), (0.2 * duration, rps), (0.4 * duration, calm)]


def offered(scenario: ScenarioName, sustainable: float) -> float:
    """Peak rate of a scenario for a fleet that sustains `sustainable` requests per second."""
    return _LOADS[scenario] * sustainable


def make_traffic(
    scenario: ScenarioName,
    rps: float,
    duration: float,
    vocabulary: Ids,
    *,
    seed: int,
    mixed: bool = False,
    sharing: Sharing | None = None,
    words: int | None = None,
) -> list[Planned]:
    """Requests in order of arrival.

    Args:
        scenario: name of the scenario.
        rps: requests per second; for burst, at its peak.
        duration: seconds of arrivals.
        vocabulary: IDs of ordinary tokens.
        seed: seed of all samples except for the shared prefixes, which are always the same.
        mixed: whether priorities are mixed, which is always the case for mixed_priority.
        sharing: shared prefixes; None uses the defaults of Sharing.
        words: seed of the tokens after the shared prefixes; `seed` if None. Another seed gives
            traffic of the same shape whose prompts are in no cache.
    """
    times = phased_arrival_times(phases(scenario, rps, duration), seed)
    generator = _TrafficGenerator(
        scenario,
        vocabulary,
        seed,
        seed if words is None else words,
        mixed=mixed,
        sharing=sharing or Sharing(),
    )
    return [generator.request(index, time) for index, time in enumerate(times)]


def slo_factor(priority: int) -> float:
    """TTFT SLO for a priority, as a multiple of an idle fleet's p99."""
    return next(factor for minimum, factor in _SLO_FACTORS if priority >= minimum)


class _TrafficGenerator:
    """Random generator of the traffic's requests."""

    def __init__(
        self,
        scenario: ScenarioName,
        vocabulary: Ids,
        seed: int,
        words: int,
        *,
        mixed: bool,
        sharing: Sharing,
    ) -> None:
        self._long_part = _LONG_PART if scenario == "long_short" else 0.0
        self._mixed = mixed or scenario == "mixed_priority"
        self._vocabulary = vocabulary
        self._sharing = sharing
        self._rng = np.random.default_rng((seed, 1))
        self._words = np.random.default_rng((words, 2))
        texts = np.random.default_rng(_PREFIX_SEED)
        self._shared: Sequence[list[int]] = [
            texts.choice(vocabulary, sharing.lengths.sample(texts)).tolist()
            for _ in range(sharing.count)
        ]

    def request(self, index: int, arrival_s: float) -> Planned:
        rng = self._rng
        # All samples are always drawn, so that options do not affect the rest of the traffic.
        is_long, is_shared = rng.random() < self._long_part, rng.random() < self._sharing.part
        shared = self._shared[int(rng.integers(len(self._shared)))]
        length, level = (_LONG_PROMPTS if is_long else PROMPTS).sample(rng), rng.random()
        prompt: list[int] = self._words.choice(self._vocabulary, length).tolist()
        priority = _priority(level) if self._mixed else DEFAULT_PRIORITY
        return Planned(
            index=index,
            arrival_s=arrival_s,
            prompt=shared + prompt if is_shared and not is_long else prompt,
            output_len=OUTPUTS.sample(rng),
            priority=priority,
            slo_factor=slo_factor(priority),
        )


def _priority(level: float) -> int:
    for priority, part in _MIX:
        if level < part:
            return priority
        level -= part
    return _MIX[-1][0]
