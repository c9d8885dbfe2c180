"""Alternating measurements of variants, so that drift in the machine's speed affects all of them
equally."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from cluster.bench.stats import Spread, percentile, ratios, spread_of_ratios

T = TypeVar("T")


class Turns(Generic[T]):
    """Results of alternating measurements, by variant and paired by round.

    Args:
        by_variant: results by variant, one per round in the order of the rounds.
    """

    def __init__(self, by_variant: Mapping[str, list[T]]) -> None:
        self.by_variant = by_variant

    def __getitem__(self, variant: str) -> list[T]:
        return self.by_variant[variant]

    def pairs(self, variant: str, other: str) -> list[tuple[T, T]]:
        """Results of a variant and of a baseline, paired by round."""
        return list(zip(self[variant], self[other], strict=True))

    def values(self, variant: str, figure: Callable[[T], float]) -> list[float]:
        """One metric of each of a variant's results, in the order of the rounds."""
        return [figure(turn) for turn in self[variant]]

    def median(self, variant: str, figure: Callable[[T], float]) -> float:
        """Median of a metric over a variant's results."""
        return percentile(self.values(variant, figure), 50.0)

    def ratios(self, variant: str, baseline: str, figure: Callable[[T], float]) -> list[float]:
        """Ratios of a metric of the variant to that of the baseline, by round."""
        return ratios(self.values(variant, figure), self.values(baseline, figure))

    def ratio(self, variant: str, baseline: str, figure: Callable[[T], float]) -> Spread:
        """Median and confidence interval of `ratios`."""
        return spread_of_ratios(self.ratios(variant, baseline, figure))

    def comparison(
        self, variant: str, baseline: str, figure: Callable[[T], float]
    ) -> dict[str, Any]:
        """Ratios in the format of results; `losing_rounds` are the 0-based rounds with a ratio
        below 1."""
        found = self.ratios(variant, baseline, figure)
        return {
            "arm": variant,
            "baseline": baseline,
            "ratio": asdict(spread_of_ratios(found)),
            "ratios": found,
            "losing_rounds": [number for number, ratio in enumerate(found) if ratio < 1.0],
        }


def take_turns(
    variants: Mapping[str, Callable[[int], T]], rounds: int, *, warmups: int = 0
) -> Turns[T]:
    """Calls each variant once per round with the round's number; drops the results of warm-ups.

    The order of the variants is reversed in every second round (A B, B A, ...), so that a trend
    cancels out in the ratios. Warm-up rounds come first, with the numbers that follow `rounds - 1`,
    so that prompts sampled with the number as seed are new in the measured rounds.

    Raises:
        ValueError: `rounds` is less than 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    turns: dict[str, list[T]] = {name: [] for name in variants}
    for number in (*range(rounds, rounds + warmups), *range(rounds)):
        names = list(variants)
        for name in names if number % 2 == 0 else reversed(names):
            turn = variants[name](number)
            if number < rounds:
                turns[name].append(turn)
    return Turns(turns)
