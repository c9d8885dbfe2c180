"""The seam between drafting and verifying, on every rank.

    resolve   rows that float ──tokens so far──> Proposer ──drafts──> rows with a place and a length
    forward   all their positions at once
    draw      at every position what plain decoding would draw there
    settle    a row keeps its draws up to the first that differs from its draft

Ranks draft by themselves, since only they know in time what the step before drew. They draft alike:
a proposer is a function of tokens, weights and keyed noise. What is drafted decides how many tokens
a step yields and never which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


class DraftRequest(NamedTuple):
    """One row that may draft."""

    slot: int
    tokens: Tokens
    """All tokens of the request so far: drafts are to follow the last. Valid during the call."""
    num_drafts: int
    """At most; at least 1."""


class Proposer(ABC):
    """Guesses how requests go on."""

    @abstractmethod
    def admit(self, slot: int, end_token_ids: Sequence[int] = ()) -> None:
        """Forgets what it knows of the slot: another request enters it, or the same anew.

        Args:
            slot: which.
            end_token_ids: tokens that end the request; drafts behind one would be in vain.
        """

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest], threshold: float) -> list[list[int]]:
        """Drafts for each request, none where it has no guess that is worth its cost.

        Args:
            requests: in the order of the step's rows.
            threshold: see `Plan.draft_threshold`.
        """


def count_equal(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the common beginning."""
    count = 0
    for guess, token in zip(draft, tokens, strict=False):
        if guess != token:
            break
        count += 1
    return count
