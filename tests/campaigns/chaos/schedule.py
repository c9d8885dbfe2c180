"""Which fault comes when, and whom it hits: the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One fault to come."""

    number: int
    """From 0."""
    at_s: float
    """After the start, at the soonest."""
    kind: str
    pick: float
    """In [0, 1): whom of several it hits."""

    def choose(self, count: int) -> int:
        """Who it is of `count`."""
        return int(self.pick * count)


def schedule(kinds: Sequence[str], period_s: float, seed: int) -> Iterator[Planned]:
    """Faults without end: round after round of all kinds, each round in an order of its own.

    So none is left out for long, and any two follow each other at some time.
    """
    if not kinds:
        raise ValueError("there is no kind of fault to run")
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
