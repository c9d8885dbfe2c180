"""Results of a Plan's rounds, as reported to the coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from worker.plan.plan import BlockOutcome, StepResult
from worker.protocol.messages import TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockResults:
    """Outcomes and tokens of one Plan's rounds."""

    outcomes: list[BlockOutcome]
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    """Log-probabilities of `token_ids`; None for a token whose request does not return any."""
    num_forwards: int

    def add_to(self, result: StepResult) -> StepResult:
        """The step's result, completed with the outcomes and tokens of its rounds."""
        return msgspec.structs.replace(
            result,
            token_ids=self.token_ids,
            blocks=self.outcomes,
            logprobs=self.logprobs if any(self.logprobs) else None,
            num_forwards=self.num_forwards,
        )


NOT_RUN: Final = BlockOutcome(num_tokens=0, is_committed=False, num_rounds=0, num_forwards=0)
"""Outcome of a window whose request had ended: no forward pass computed it."""
