"""Prompt lookup (n-gram drafts) on the device: the tokens that followed an earlier occurrence of a
request's latest tokens."""

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
    """Drafts for the tokens after the newest ones, int32 [F, count], and lengths of the matches,
    int64 [F], 0 for none.

    The match is the longest earlier occurrence of the latest tokens, the last one of several.
    Drafts are the tokens after it, starting over when they reach the newest token. Without a match
    they repeat the newest token.

    Args:
        token_pool: int32 [slots, positions].
        lookup: F rows, and the lengths to compare.
    """
    return _DRAFT.select(token_pool)(token_pool, lookup)


__all__ = ["NgramLookup", "draft_ngrams", "follow_ngram"]
