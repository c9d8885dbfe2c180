"""Workloads of `router --real`: shorter versions of the simulation's, with text prompts whose
tokens are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deploy.benchmarks.routing.paced import Vocabulary, Words

OUTPUT = 12
"""Number of tokens that each request generates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One request."""

    name: str
    at: float
    """Seconds from the start, or from the end of `after` if set."""
    prompt: str
    after: str = ""
    """Name of a request that must finish first; empty if there is none."""
    measured: bool = True
    """Whether metrics include this request; false for warm-up requests."""


def workloads(
    vocabulary: Vocabulary, num_workers: int, pace: float, scale: float
) -> Mapping[str, Callable[[int], Sequence[Planned]]]:
    """Functions that create a workload from a seed, keyed by name.

    Args:
        vocabulary: words that prompts consist of.
        num_workers: number of workers; number and rate of requests are proportional to it.
        pace: factor for the times between requests.
        scale: factor for the number of requests.
    """
    rate = num_workers / pace
    makers = {
        "shared-prompts": _shared_prompts,
        "multi-turn": _multi_turn,
        "sibling-burst": _sibling_burst,
        "hot-prefix": _hot_prefix,
    }
    return {
        name: lambda seed, make=make: make(_Draw(seed, vocabulary), rate, num_workers, scale)  # type: ignore[misc]
        for name, make in makers.items()
    }


def _shared_prompts(draw: _Draw, rate: float, workers: int, scale: float) -> Sequence[Planned]:
    """Requests that share system prompts of 1,500 tokens. There are ten prompts per worker, which
    together fill over half of all caches."""
    prompts = [draw.words(1500) for _ in range(10 * workers)]
    count = int(75 * workers * scale)
    return [
        Planned(
            name=f"r{n}",
            at=at,
            prompt=draw.text(prompts[draw.below(len(prompts))], draw.words(150)),
            measured=n >= count // 4,
        )
        for n, at in draw.times(5.5 * rate, count)
    ]


def _multi_turn(draw: _Draw, rate: float, workers: int, scale: float) -> Sequence[Planned]:
    """Conversations of five turns, with pauses between turns."""
    system = draw.words(300)
    requests = []
    for n, at in draw.times(1.3 * rate, int(15 * workers * scale)):
        prompt = np.concatenate([system, draw.words(draw.between(300, 1500))])
        for turn in range(5):
            wait = at if not turn else 0.5 + draw.exponential(1.5)
            last = f"c{n}.{turn - 1}" if turn else ""
            requests.append(
                Planned(name=f"c{n}.{turn}", at=wait, prompt=draw.text(prompt), after=last)
            )
            output = np.zeros(OUTPUT, np.int64)  # see `paced.Vocabulary.answer_id`
            prompt = np.concatenate([prompt, output, draw.words(draw.between(50, 400))])
    return requests


def _sibling_burst(draw: _Draw, rate: float, workers: int, scale: float) -> Sequence[Planned]:
    """Bursts of 16 requests at once that share a new prefix of 3,000 tokens."""
    requests = []
    for n, at in draw.times(0.4 * rate, int(5 * workers * scale) or 1):
        prompt = draw.words(3000)
        requests += [
            Planned(name=f"b{n}.{child}", at=at, prompt=draw.text(prompt, draw.words(60)))
            for child in range(16)
        ]
    return requests


def _hot_prefix(draw: _Draw, rate: float, workers: int, scale: float) -> Sequence[Planned]:
    """Requests that all share a prefix of 3,000 tokens. No worker has cached it at the start."""
    prompt = draw.words(3000)
    return [
        Planned(name=f"r{n}", at=at, prompt=draw.text(prompt, draw.words(200)))
        for n, at in draw.times(8.0 * rate, int(75 * workers * scale))
    ]


class _Draw:
    """Random generator for workloads."""

    def __init__(self, seed: int, vocabulary: Vocabulary) -> None:
        self._random = np.random.default_rng(seed)
        self.vocabulary = vocabulary

    def times(self, rate: float, count: int) -> Iterator[tuple[int, float]]:
        """Indices and times of Poisson arrivals."""
        yield from enumerate(np.cumsum(self._random.exponential(1.0 / rate, count)).tolist())

    def words(self, count: int) -> Words:
        return self._random.integers(0, len(self.vocabulary), count)

    def text(self, *parts: Words) -> str:
        return self.vocabulary.text(np.concatenate(parts))

    def below(self, limit: int) -> int:
        return int(self._random.integers(limit))

    def between(self, low: int, high: int) -> int:
        return int(self._random.integers(low, high))

    def exponential(self, mean: float) -> float:
        return float(self._random.exponential(mean))
