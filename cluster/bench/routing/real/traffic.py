"""The requests, as text whose tokens are known: same shapes as the simulation's, in less time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.bench.routing.paced import Vocabulary, Words

OUTPUT = 12
"""Tokens that each request generates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One request."""

    name: str
    at: float
    """Seconds from the start; after the end of `after`, where that is given."""
    prompt: str
    after: str = ""
    measured: bool = True


def workloads(
    vocabulary: Vocabulary, num_workers: int, pace: float, scale: float
) -> Mapping[str, Callable[[int], Sequence[Planned]]]:
    """Makers of traffic by name; each takes a seed.

    Args:
        vocabulary: words to draw from.
        num_workers: the traffic grows with them.
        pace: the traffic is as much sparser.
        scale: multiplies the number of requests.
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
    """System prompts of 1,500 tokens, ten per worker: over half of what all caches hold."""
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
    """Conversations of five turns; a user reads and thinks before the next."""
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
            said = np.zeros(OUTPUT, np.int64)  # see `paced.Vocabulary.answer_id`
            prompt = np.concatenate([prompt, said, draw.words(draw.between(50, 400))])
    return requests


def _sibling_burst(draw: _Draw, rate: float, workers: int, scale: float) -> Sequence[Planned]:
    """16 requests at once on a new prompt of 3,000 tokens, time and again."""
    requests = []
    for n, at in draw.times(0.4 * rate, int(5 * workers * scale) or 1):
        prompt = draw.words(3000)
        requests += [
            Planned(name=f"b{n}.{child}", at=at, prompt=draw.text(prompt, draw.words(60)))
            for child in range(16)
        ]
    return requests


def _hot_prefix(draw: _Draw, rate: float, workers: int, scale: float) -> Sequence[Planned]:
    """One prompt of 3,000 tokens before everything, and nobody has it at the start."""
    prompt = draw.words(3000)
    return [
        Planned(name=f"r{n}", at=at, prompt=draw.text(prompt, draw.words(200)))
        for n, at in draw.times(8.0 * rate, int(75 * workers * scale))
    ]


class _Draw:
    """Random numbers of one seed."""

    def __init__(self, seed: int, vocabulary: Vocabulary) -> None:
        self._random = np.random.default_rng(seed)
        self.vocabulary = vocabulary

    def times(self, rate: float, count: int) -> Iterator[tuple[int, float]]:
        """Numbers and times of Poisson arrivals."""
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
