"""Prompt lookup on the device: what followed the last time that the latest tokens occurred."""

from __future__ import annotations

import torch

from kernels.draft_ngrams import reference
from kernels.draft_ngrams.base import NgramLookup
from kernels.draft_ngrams.reference import follow_ngram
from kernels.registry import registry

_DRAFT = registry.register(
    "draft_ngrams",
    reference.draft_ngrams,
    triton="kernels.draft_ngrams.triton_kernel:draft_ngrams",
)


def draft_ngrams(
    token_pool: torch.Tensor, lookup: NgramLookup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Guesses for the tokens after the newest ones, int32 [F, count], and the lengths, int64 [F],
    of the occurrences that they follow, 0 for none.

    They follow the latest of the longest earlier occurrences of the last tokens, and go on from
    its beginning where that reaches the end; without any occurrence they repeat the newest token.

    Args:
        token_pool: int32 [slots, positions].
        lookup: of F rows.
    """
    return _DRAFT.select(token_pool)(token_pool, lookup)


__all__ = ["NgramLookup", "draft_ngrams", "follow_ngram"]
