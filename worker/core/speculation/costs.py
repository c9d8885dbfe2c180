"""What drafts cost: steps' times, fitted apart for every size of batch.

    milliseconds = plain · rows + look · rows that may draft + draft · drafts
                   + prompt · prompt tokens

A look is what a row pays for being asked: to search or to run the draft model for its first guess,
and to be placed. That it drafts eight tokens then costs hardly more than one: `draft` is what one
more takes to make and to verify. A step of few rows waits for weights, one of many for arithmetic:
`draft` is small beside `plain` in the first and nearly as large in the second, so one fit through
all sizes would be wrong at both ends.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

_KEEP = 0.99
"""Weight that a step keeps with each later one of its size."""
_WARM_UP = 8.0
"""Steps of a size before its fit is believed, and before one is held against it."""
_HELD_UP = 2.0
"""A step that took more than so many times what was expected counts as one that took this."""
_FIRST_LOOK_MS = 0.02
_DRAFTING_STEP = 0.1
"""Weight of the newest step in the time that drafting takes."""
_PRIOR_SHARE = 0.3
"""A draft's cost, or a prompt token's, beside that of an average token, until it is measured."""
_PRIOR_WEIGHTS = np.array((1e-9, 0.25, 1.0, 1.0))
"""Of what is supposed of rows, looks, drafts and prompt tokens: as so many of each, squared."""
_EVERY, _MANY = 4, 32.0
"""Of so many steps without drafts one is looked at, once so many are known."""


class StepCost(NamedTuple):
    """What one step did and took."""

    num_rows: int
    """Requests that decoded; at least 1. Rows in which nothing was computed, as behind the end of a
    request, are none."""
    num_looks: int
    """Those of them that were allowed to draft."""
    num_drafts: int
    """Drafts that were verified."""
    num_prompts: int
    """Tokens."""
    num_tokens: int
    """That came of the rows that decoded."""
    elapsed_ms: float
    """With drafting."""


class Rates(NamedTuple):
    """What steps of one size of batch cost and yield."""

    look_ms: float
    draft_ms: float
    tokens_per_ms: float
    """With what their drafts take and without what prompts do."""


class _Fit:
    """Least squares over steps with about the same number of rows, per row, with forgetting."""

    def __init__(self) -> None:
        self.weight = 0.0
        self.rates = Rates(0.0, 0.0, 0.0)
        self._rows = self._tokens = 0.0
        self._products = np.zeros((4, 4))
        self._elapsed = np.zeros(4)
        self._costs = np.zeros(4)
        self._num_unsolved = 0
        """Steps since costs were last computed."""
        self._num_plain = 0

    def skips(self) -> bool:
        self._num_plain += 1
        return self.weight > _MANY and self._num_plain % _EVERY > 0

    def add(self, step: StepCost) -> None:
        self._add(step, _EVERY if not step.num_looks and self.weight > _MANY else 1)

    def _add(self, step: StepCost, times: int) -> None:
        num_rows, keep = step.num_rows, _KEEP**times
        each = np.array((num_rows, step.num_looks, step.num_drafts, step.num_prompts)) / num_rows
        elapsed = step.elapsed_ms / num_rows
        if self.weight >= _WARM_UP:
            usual = max(self._costs @ each, self._elapsed[0] / self.weight)
            elapsed = min(elapsed, _HELD_UP * usual)
        self.weight = self.weight * keep + times
        self._rows = self._rows * keep + times * num_rows
        self._tokens = self._tokens * keep + times * step.num_tokens / num_rows
        self._products = self._products * keep + times * np.outer(each, each)
        self._elapsed = self._elapsed * keep + times * elapsed * each
        self._num_unsolved += times
        if self._num_unsolved >= _EVERY or self.weight < _MANY:
            self._num_unsolved = 0
            self._solve()

    def _solve(self) -> None:
        average = _PRIOR_SHARE * self._elapsed[0] / self._products[0].sum()
        supposed = np.array((0.0, _FIRST_LOOK_MS, average, average))
        prior = _PRIOR_WEIGHTS * (self.weight / self._rows) ** 2
        self._costs = np.linalg.solve(
            self._products + np.diag(prior), self._elapsed + prior * supposed
        )
        self.rates = self._rates()

    def _rates(self) -> Rates:
        plain_ms, look_ms, draft_ms, _ = self._costs.tolist()
        _, looks, drafts, _ = (self._products[0] / self.weight).tolist()
        row_ms = max(plain_ms + look_ms * looks + draft_ms * drafts, 1e-6)
        # One more token in a step costs no more than those that are in it do on average.
        bounded = min(max(0.0, draft_ms), row_ms / (1.0 + drafts))
        if looks:
            look_ms += (draft_ms - bounded) * drafts / looks
        return Rates(max(0.0, look_ms), bounded, self._tokens / self.weight / row_ms)


class StepCosts:
    """Learns from every step with decoding rows; see the module."""

    def __init__(self) -> None:
        self._fits: dict[int, _Fit] = {}

    def skips(self, num_rows: int) -> bool:
        """Whether a step in which no row may draft need not be told, as most of them."""
        return self._fit(num_rows).skips()

    def observe(self, step: StepCost) -> None:
        """Takes one step; of those in which no row may draft, only what `skips` leaves."""
        self._fit(step.num_rows).add(step)

    def _fit(self, num_rows: int) -> _Fit:
        return self._fits.setdefault(size_class(num_rows), _Fit())

    def rates(self, num_rows: int) -> Rates | None:
        """Of steps of so many rows.

        Of the size next to it where this one was hardly seen; None where no size was.
        """
        key = size_class(num_rows)
        fit = self._fits.get(key)
        if fit is None or fit.weight < _WARM_UP:
            known = [size for size, one in self._fits.items() if one.weight >= _WARM_UP]
            if not known:
                return None
            fit = self._fits[min(known, key=lambda other: (abs(other - key), other))]
        return fit.rates


class DraftingTimes:
    """Milliseconds that drafting takes per row that looks, by size of batch, and per new request.

    A request's first look takes more: a draft model computes its prompt, n-grams are entered.
    """

    def __init__(self) -> None:
        self.start_ms = 0.0
        """What a first look takes beyond others."""
        self._look_ms: dict[int, float] = {}
        self._last = _FIRST_LOOK_MS

    def observe(self, num_rows: int, num_looks: int, num_new: int, elapsed_ms: float) -> None:
        """Takes how many of so many rows looked in one step, some for the first time.

        Args:
            num_rows: of the step.
            num_looks: at least 1.
            num_new: of these the first of their requests.
            elapsed_ms: what drafting took.
        """
        look_ms = self.look_ms(num_rows)
        expected = look_ms * num_looks + self.start_ms * num_new
        # What was held up by something else tells nothing.
        error = min(elapsed_ms, _HELD_UP * expected) - expected
        error *= _DRAFTING_STEP / (num_looks**2 + num_new**2)
        self.start_ms = max(0.0, self.start_ms + error * num_new)
        self._last = max(1e-3, look_ms + error * num_looks)
        self._look_ms[size_class(num_rows)] = self._last

    def look_ms(self, num_rows: int) -> float:
        """Of a look in a step of so many rows."""
        return self._look_ms.get(size_class(num_rows), self._last)


def size_class(num_rows: int) -> int:
    """Numbers up to 8 stand for themselves, larger ones in groups that differ by a fifth."""
    return num_rows if num_rows <= 8 else 8 + round(4 * math.log2(num_rows / 8))
