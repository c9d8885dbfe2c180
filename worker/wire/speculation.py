"""What speculation did, for metrics."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class Decision(IntEnum):
    """Why a decoding request got drafts in a step, or got none."""

    DRAFT = 0
    """They pay for their cost, or drafting is not adaptive."""
    PROBE = 1
    """To see whether they have become so."""
    ACCEPTANCE = 2
    """None: too few of its drafts are accepted."""
    COST = 3
    """None: the batch is so large that no acceptance would pay."""
    COST_UNKNOWN = 4
    """None: no plain steps of this size were seen yet, or lately."""
    UTILIZATION = 5
    """None: too many slots are in use."""
    PRIORITY = 6
    """None: its priority is too high to take chances."""
    GRAMMAR = 7
    """None: its grammar is slow."""
    DEADLINE = 8
    """None: its next token is due, by its SLO, too soon to take chances."""


class SpeculationTotals(msgspec.Struct, array_like=True):
    """Sums since the epoch began."""

    num_drafts: int = 0
    """Rows with drafts."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_decode_rows: int = 0
    """Rows of decode steps, with drafts and without."""
    num_decode_tokens: int = 0
    """Tokens that came of them."""
    drafted_at: list[int] = []
    """Drafts by position in their row."""
    accepted_at: list[int] = []
    decisions: list[int] = []
    """By `Decision`."""

    @staticmethod
    def of(num_speculative_tokens: int) -> SpeculationTotals:
        """Zeros, with as many positions."""
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
        """Counts one decision, about so many requests."""
        self.decisions[decision] += times
