"""What a draft costs: decode steps' times, fitted apart for every size of batch.

    milliseconds = plain(rows) + draft(rows) · drafts

A step of few rows waits for weights, one of many for arithmetic: `draft` is small beside
`plain / rows` in the first and nearly as large in the second, so one line through all sizes would
be wrong at both ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_KEEP = 0.98
"""Weight that a step keeps with each later one of its size."""
_WARM_UP = 8.0
"""Steps of a size before its line is believed, and before one is held against it."""
_HELD_UP = 2.0
"""A step that took more than so many times what was expected counts as one that took this."""
_FIRST_LOOK_MS = 0.02
_LOOK_STEP = 0.05
"""Weight of the newest step in the time that looking takes."""
_PRIOR_SHARE = 0.3
"""A draft's cost beside that of an average token of its step, until it is measured."""
_PRIOR_WEIGHT = 4.0
"""Of this prior: drafts squared."""


@dataclass(slots=True)
class _Line:
    """Least squares over steps with about the same number of rows, with forgetting."""

    weight: float = 0.0
    rows: float = 0.0
    drafts: float = 0.0
    drafts_squared: float = 0.0
    elapsed: float = 0.0
    drafts_elapsed: float = 0.0
    tokens: float = 0.0
    spent: float = 0.0
    """With what drafting took."""

    def add(
        self, num_rows: int, num_drafts: int, num_tokens: int, step_ms: float, drafting_ms: float
    ) -> None:
        if self.weight >= _WARM_UP:
            slope = self.draft_ms()
            expected = self.elapsed / self.weight
            expected += slope * (num_drafts - self.drafts / self.weight)
            step_ms = min(step_ms, _HELD_UP * expected)
        self.weight = self.weight * _KEEP + 1.0
        self.rows = self.rows * _KEEP + num_rows
        self.drafts = self.drafts * _KEEP + num_drafts
        self.drafts_squared = self.drafts_squared * _KEEP + num_drafts**2
        self.elapsed = self.elapsed * _KEEP + step_ms
        self.drafts_elapsed = self.drafts_elapsed * _KEEP + num_drafts * step_ms
        self.tokens = self.tokens * _KEEP + num_tokens
        self.spent = self.spent * _KEEP + step_ms + min(drafting_ms, _HELD_UP * step_ms)

    def draft_ms(self) -> float:
        # One more token in a step costs no more than those that are in it do on average.
        average = self.elapsed / (self.rows + self.drafts)
        variance = self.drafts_squared - self.drafts**2 / self.weight
        covariance = self.drafts_elapsed - self.drafts * self.elapsed / self.weight
        fitted = (covariance + _PRIOR_WEIGHT * _PRIOR_SHARE * average) / (variance + _PRIOR_WEIGHT)
        return min(max(0.0, fitted), average)


class StepCosts:
    """Learns from every decode step; see the module."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}

    def observe(
        self,
        num_rows: int,
        num_drafts: int,
        num_tokens: int,
        step_ms: float,
        drafting_ms: float = 0.0,
    ) -> None:
        """Takes one step without prompts.

        Args:
            num_rows: requests that decoded.
            num_drafts: drafts that were verified.
            num_tokens: tokens that came of it.
            step_ms: its time, without that of drafting.
            drafting_ms: this.
        """
        line = self._lines.setdefault(_key(num_rows), _Line())
        line.add(num_rows, num_drafts, num_tokens, step_ms, drafting_ms)

    def rates(self, num_rows: int) -> tuple[float, float] | None:
        """Milliseconds of a draft and tokens per millisecond in steps of so many rows.

        Of the size next to it where this one was hardly seen; None where no size was.
        """
        key = _key(num_rows)
        line = self._lines.get(key)
        if line is None or line.weight < _WARM_UP:
            known = [key for key, line in self._lines.items() if line.weight >= _WARM_UP]
            if not known:
                return None
            line = self._lines[min(known, key=lambda other: (abs(other - key), other))]
        return line.draft_ms(), line.tokens / line.spent


class LookCosts:
    """Milliseconds of looking for a draft, by size of batch: of one row, or of one guess."""

    def __init__(self) -> None:
        self._ms: dict[int, float] = {}
        self._last = _FIRST_LOOK_MS

    def observe(self, num_rows: int, num_looks: int, elapsed_ms: float) -> None:
        """Takes what one step of so many rows looked, and the time that it took."""
        key = _key(num_rows)
        known = self._ms.get(key, self._last)
        # What was held up by something else tells nothing.
        found = min(elapsed_ms / num_looks, _HELD_UP * known)
        self._ms[key] = self._last = known + _LOOK_STEP * (found - known)

    def value(self, num_rows: int) -> float:
        """Of a look in a step of so many rows."""
        return self._ms.get(_key(num_rows), self._last)


def _key(num_rows: int) -> int:
    """Numbers up to 8 stand for themselves, larger ones in groups that differ by a fifth."""
    return num_rows if num_rows <= 8 else 8 + round(4 * math.log2(num_rows / 8))
