"""Schedule of faults and their targets, determined by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A scheduled fault."""

    number: int
    """0-based number of the fault."""
    at_s: float
    """Earliest time in seconds after the start."""
    kind: str
    pick: float
    """Random number in [0, 1) that selects one of several targets."""

    def choose(self, count: int) -> int:
        """Index of the target among `count`."""
        return int(self.pick * count)


def schedule(kinds: Sequence[str], period_s: float, seed: int) -> Iterator[Planned]:
    """Infinite sequence of faults. Each round has all kinds in random order, so that all kinds are
    equally frequent and any two kinds can follow each other."""
    if not kinds:
        raise ValueError("no kind of fault to run")
    chance = random.Random(seed)
    number = 0
    while True:
        order = list(kinds)
        chance.shuffle(order)
        for kind in order:
            yield Planned(
                number=number, at_s=(number + 1) * period_s, kind=kind, pick=chance.random()
            )
            number += 1
