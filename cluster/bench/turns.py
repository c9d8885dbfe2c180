"""Run variants in turn, so that a drifting machine hurts all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from cluster.bench.stats import Spread, percentile, ratios, spread_of_ratios

T = TypeVar("T")


class Turns(Generic[T]):
    """Results of each variant, turn by turn; turns of one round form a pair.

    Args:
        by_variant: equally many turns of each, in the order of the rounds.
    """

    def __init__(self, by_variant: Mapping[str, list[T]]) -> None:
        self.by_variant = by_variant

    def __getitem__(self, variant: str) -> list[T]:
        return self.by_variant[variant]

    def pairs(self, variant: str, other: str) -> list[tuple[T, T]]:
        """A variant's turns, each with the other's of the same round."""
        return list(zip(self[variant], self[other], strict=True))

    def values(self, variant: str, figure: Callable[[T], float]) -> list[float]:
        """A figure of each of the variant's turns."""
        return [figure(turn) for turn in self[variant]]

    def median(self, variant: str, figure: Callable[[T], float]) -> float:
        """The figure's median over the variant's turns."""
        return percentile(self.values(variant, figure), 50.0)

    def ratios(self, variant: str, baseline: str, figure: Callable[[T], float]) -> list[float]:
        """The variant's figure over the baseline's, pair by pair."""
        return ratios(self.values(variant, figure), self.values(baseline, figure))

    def ratio(self, variant: str, baseline: str, figure: Callable[[T], float]) -> Spread:
        """Median and interval of these ratios."""
        return spread_of_ratios(self.ratios(variant, baseline, figure))

    def comparison(
        self, variant: str, baseline: str, figure: Callable[[T], float]
    ) -> dict[str, Any]:
        """The ratios as results report them; `losing_rounds` count from 0: there it was below 1."""
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
    """Calls every variant once per round with the round's number; those to warm up come first.

    The order turns round in every second round (A B, B A, ...): a trend then cancels out of the
    ratios instead of favouring whoever runs first. Rounds to warm up have numbers beyond those that
    count, so that what is drawn from a number is not known yet when it counts.

    Raises:
        ValueError: there is no round.
    """
    if rounds < 1:
        raise ValueError("at least one round is needed")
    turns: dict[str, list[T]] = {name: [] for name in variants}
    for number in (*range(rounds, rounds + warmups), *range(rounds)):
        names = list(variants)
        for name in names if number % 2 == 0 else reversed(names):
            turn = variants[name](number)
            if number < rounds:
                turns[name].append(turn)
    return Turns(turns)
