"""Speculative decoding: decisions and totals, for metrics."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class Decision(IntEnum):
    """Decision about drafts for a decoding request in one step, by its reason."""

    DRAFT = 0
    """Drafts: they pay for their cost, or drafting is not adaptive."""
    PROBE = 1
    """Drafts, to see whether they pay by now."""
    ACCEPTANCE = 2
    """No drafts: too few are accepted."""
    COST = 3
    """No drafts: the batch is so large that they would not pay even if all were accepted."""
    COST_UNKNOWN = 4
    """No drafts: step times cannot be predicted yet, or the step serves to measure rows without."""
    UTILIZATION = 5
    """No drafts: too many slots are in use."""
    PRIORITY = 6
    """No drafts: the request's priority is above `speculative_max_priority`."""
    GRAMMAR = 7
    """No drafts: the request's grammar is too slow."""
    DEADLINE = 8
    """No drafts: the request's next token is due, by its SLO, within `deadline_margin_ms`."""


class SpeculationTotals(msgspec.Struct, array_like=True):
    """Totals of speculative decoding since the epoch began."""

    num_drafts: int = 0
    """Rows with drafts."""
    num_draft_tokens: int = 0
    """Drafts."""
    num_accepted_tokens: int = 0
    """Drafts that were accepted."""
    num_decode_rows: int = 0
    """Rows of steps that only decode, with drafts and without."""
    num_decode_tokens: int = 0
    """Tokens that `num_decode_rows` yielded."""
    drafted_at: list[int] = []
    """Drafts by their position in the row."""
    accepted_at: list[int] = []
    """Accepted drafts by their position in the row."""
    decisions: list[int] = []
    """Decisions about requests, by `Decision`."""

    @staticmethod
    def of(num_speculative_tokens: int) -> SpeculationTotals:
        """Totals of zero, with `num_speculative_tokens` positions."""
        return SpeculationTotals(
            drafted_at=[0] * num_speculative_tokens,
            accepted_at=[0] * num_speculative_tokens,
            decisions=[0] * len(Decision),
        )

    def add_row(self, num_drafts: int, num_accepted: int) -> None:
        """Counts one row's drafts."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for position in range(num_drafts):
            self.drafted_at[position] += 1
        for position in range(num_accepted):
            self.accepted_at[position] += 1

    def count(self, decision: Decision, times: int = 1) -> None:
        """Counts a decision about `times` requests."""
        self.decisions[decision] += times
