"""What drafts cost: decode steps' times, fitted apart for every size of batch.

    milliseconds = plain · rows + look · rows that may draft + draft · drafts

A look is what a row pays for being asked: to search or to run the draft model for its first guess,
and to be placed. That it drafts eight tokens then costs hardly more than one: `draft` is what one
more takes to make and to verify. A step of few rows waits for weights, one of many for arithmetic:
`draft` is small beside `plain` in the first and nearly as large in the second, so one fit through
all sizes would be wrong at both ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

_KEEP = 0.99
"""Weight that a step keeps with each later one of its size."""
_WARM_UP = 8.0
"""Steps of a size before its fit is believed, and before one is held against it."""
_HELD_UP = 2.0
"""A step that took more than so many times what was expected counts as one that took this."""
_FIRST_LOOK_MS = 0.02
_LOOK_STEP = 0.05
"""Weight of the newest step in the time that looking takes."""
_PRIOR_SHARE = 0.3
"""A draft's cost beside that of an average token of its step, until it is measured."""
_PRIOR_WEIGHT, _LOOK_PRIOR_WEIGHT = 1.0, 0.25
"""Of this prior: drafts squared; of a look's: looks squared."""


class Rates(NamedTuple):
    """What steps of one size of batch cost and yield."""

    look_ms: float
    draft_ms: float
    tokens_per_ms: float
    """With what their drafts took."""


@dataclass(slots=True)
class _Fit:
    """Least squares over steps with about the same number of rows, per row, with forgetting."""

    weight: float = 0.0
    rows: float = 0.0
    tokens: float = 0.0
    looks: float = 0.0
    """This and the following: sums of quotients by rows."""
    drafts: float = 0.0
    elapsed: float = 0.0
    looks_squared: float = 0.0
    drafts_squared: float = 0.0
    looks_drafts: float = 0.0
    looks_elapsed: float = 0.0
    drafts_elapsed: float = 0.0
    spent: float = 0.0

    def add(
        self, num_rows: int, num_looks: int, num_drafts: int, num_tokens: int, step_ms: float
    ) -> None:
        looks, drafts = num_looks / num_rows, num_drafts / num_rows
        elapsed = step_ms / num_rows
        if self.weight >= _WARM_UP:
            rates, weight = self.rates(), self.weight
            expected = self.elapsed / weight
            expected += rates.look_ms * (looks - self.looks / weight)
            expected += rates.draft_ms * (drafts - self.drafts / weight)
            elapsed = min(elapsed, _HELD_UP * max(expected, self.elapsed / weight))
        self.weight = self.weight * _KEEP + 1.0
        self.rows = self.rows * _KEEP + num_rows
        self.tokens = self.tokens * _KEEP + num_tokens
        self.looks = self.looks * _KEEP + looks
        self.drafts = self.drafts * _KEEP + drafts
        self.elapsed = self.elapsed * _KEEP + elapsed
        self.looks_squared = self.looks_squared * _KEEP + looks**2
        self.drafts_squared = self.drafts_squared * _KEEP + drafts**2
        self.looks_drafts = self.looks_drafts * _KEEP + looks * drafts
        self.looks_elapsed = self.looks_elapsed * _KEEP + looks * elapsed
        self.drafts_elapsed = self.drafts_elapsed * _KEEP + drafts * elapsed
        self.spent = self.spent * _KEEP + elapsed * num_rows

    def rates(self) -> Rates:
        weight, rows = self.weight, self.rows / self.weight
        # One more token in a step costs no more than those that are in it do on average.
        average = self.spent / (self.rows + self.drafts * rows)
        prior, look_prior = _PRIOR_WEIGHT / rows**2, _LOOK_PRIOR_WEIGHT / rows**2
        looks = self.looks_squared - self.looks**2 / weight + look_prior
        drafts = self.drafts_squared - self.drafts**2 / weight + prior
        both = self.looks_drafts - self.looks * self.drafts / weight
        by_looks = self.looks_elapsed - self.looks * self.elapsed / weight
        by_looks += look_prior * _FIRST_LOOK_MS
        by_drafts = self.drafts_elapsed - self.drafts * self.elapsed / weight
        by_drafts += prior * _PRIOR_SHARE * average
        draft_ms = (by_drafts * looks - by_looks * both) / (looks * drafts - both**2)
        draft_ms = min(max(0.0, draft_ms), average)
        look_ms = max(0.0, (by_looks - both * draft_ms) / looks)
        return Rates(look_ms, draft_ms, self.tokens / self.spent)


class StepCosts:
    """Learns from every decode step; see the module."""

    def __init__(self) -> None:
        self._fits: dict[int, _Fit] = {}

    def observe(
        self, num_rows: int, num_looks: int, num_drafts: int, num_tokens: int, step_ms: float
    ) -> None:
        """Takes one step without prompts.

        Args:
            num_rows: requests that decoded; at least 1. Rows in which nothing was computed, as
                behind the end of a request, are none.
            num_looks: those of them that were allowed to draft.
            num_drafts: drafts that were verified.
            num_tokens: tokens that came of it.
            step_ms: its time, with that of drafting.
        """
        fit = self._fits.setdefault(size_class(num_rows), _Fit())
        fit.add(num_rows, num_looks, num_drafts, num_tokens, step_ms)

    def rates(self, num_rows: int) -> Rates | None:
        """Of steps of so many rows.

        Of the size next to it where this one was hardly seen; None where no size was.
        """
        key = size_class(num_rows)
        fit = self._fits.get(key)
        if fit is None or fit.weight < _WARM_UP:
            known = [key for key, fit in self._fits.items() if fit.weight >= _WARM_UP]
            if not known:
                return None
            fit = self._fits[min(known, key=lambda other: (abs(other - key), other))]
        return fit.rates()


class LookTimes:
    """Milliseconds that drafting takes per row, by size of batch."""

    def __init__(self) -> None:
        self._ms: dict[int, float] = {}
        self._last = _FIRST_LOOK_MS

    def observe(self, num_rows: int, num_looks: int, elapsed_ms: float) -> None:
        """Takes how many of so many rows looked in one step, and the time that it took."""
        key = size_class(num_rows)
        known = self._ms.get(key, self._last)
        # What was held up by something else tells nothing.
        found = min(elapsed_ms / num_looks, _HELD_UP * known)
        self._ms[key] = self._last = known + _LOOK_STEP * (found - known)

    def value(self, num_rows: int) -> float:
        """Of a look in a step of so many rows."""
        return self._ms.get(size_class(num_rows), self._last)


def size_class(num_rows: int) -> int:
    """Numbers up to 8 stand for themselves, larger ones in groups that differ by a fifth."""
    return num_rows if num_rows <= 8 else 8 + round(4 * math.log2(num_rows / 8))
