"""Run arms in turn, so that a drifting machine hurts all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from cluster.bench.stats import Spread, ratios, spread_of_ratios

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One arm against the baseline arm, pair by pair."""

    arm: str
    baseline: str
    ratio: Spread
    """Of value(arm) / value(baseline) over the rounds."""
    ratios: tuple[float, ...]
    losing_rounds: tuple[int, ...]
    """Rounds, from 0, in which the arm's value was the lower one."""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return asdict(self)


def alternate(arms: Mapping[str, Callable[[int], T]], rounds: int) -> dict[str, list[T]]:
    """Calls every arm once per round with the round's number.

    The order turns round in every second round (A B, B A, ...): a trend then cancels out of the
    ratios instead of favouring whoever runs first.
    """
    if rounds < 1:
        raise ValueError("at least one round is needed")
    results: dict[str, list[T]] = {name: [] for name in arms}
    for number in range(rounds):
        names = list(arms)
        for name in names if number % 2 == 0 else reversed(names):
            results[name].append(arms[name](number))
    return results


def compare(values: Mapping[str, Sequence[float]], baseline: str) -> list[Comparison]:
    """Every other arm against `baseline`; values of one round form a pair."""
    found: list[Comparison] = []
    for arm, measured in values.items():
        if arm == baseline:
            continue
        pairs = ratios(measured, values[baseline])
        found.append(
            Comparison(
                arm=arm,
                baseline=baseline,
                ratio=spread_of_ratios(pairs),
                ratios=tuple(pairs),
                losing_rounds=tuple(i for i, ratio in enumerate(pairs) if ratio < 1.0),
            )
        )
    return found
