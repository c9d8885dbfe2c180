"""Drafts from the known outputs of requests; most of them are correct."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from worker.rank.speculation.base import DraftRequest
from worker.rank.speculation.ngram import NgramProposer

MATCH = 12
"""Match length that drafts report: the most promising level."""


class OracleDrafts:
    """Makes n-gram proposers draft the known continuations of requests. Errors depend only on the
    tokens, so that all ranks make the same drafts.

    Args:
        patch: patches proposers.
        texts: tokens of each request: prompt and output.
    """

    def __init__(self, patch: pytest.MonkeyPatch, texts: Sequence[Sequence[int]]) -> None:
        self._texts = [list(text) for text in texts]

        def find(
            proposer: NgramProposer, requests: Sequence[DraftRequest]
        ) -> list[tuple[list[int], int]]:
            pool = proposer._token_pool.numpy()
            return [
                (self.continuation(pool[slot, :n].tolist(), count), MATCH)
                for slot, n, count in requests
            ]

        def look_up(
            proposer: NgramProposer,
            slots: torch.Tensor,
            newest: torch.Tensor,
            *,
            count: int,
            num_tokens: int,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            pool = proposer._token_pool
            rows = zip(slots.tolist(), newest.tolist(), strict=True)
            drafts = [self.continuation(pool[slot, : at + 1].tolist(), count) for slot, at in rows]
            return torch.tensor(drafts, dtype=torch.int32), torch.full_like(slots, MATCH)

        patch.setattr(NgramProposer, "_find", find)
        patch.setattr(NgramProposer, "look_up", look_up)

    def continuation(self, known: list[int], count: int) -> list[int]:
        """Next tokens of the request that has these tokens; 1/4 of them are wrong."""
        for text in self._texts:
            if text[: len(known)] == known and len(text) > len(known):
                right = text[len(known) : len(known) + count]
                drafts = [
                    token if hash((len(known), number, token)) % 4 else max(0, token - 1)
                    for number, token in enumerate(right)
                ]
                return drafts + [0] * (count - len(drafts))
        return [0] * count
