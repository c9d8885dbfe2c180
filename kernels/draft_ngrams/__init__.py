"""Prompt lookup on the device: what followed the last time that the latest tokens occurred."""

from __future__ import annotations

import torch

from kernels.draft_ngrams import reference
from kernels.registry import registry

_DRAFT = registry.register(
    "draft_ngrams",
    reference.draft_ngrams,
    triton="kernels.draft_ngrams.triton_kernel:draft_ngrams",
)


def draft_ngrams(
    token_pool: torch.Tensor,
    slots: torch.Tensor,
    newest: torch.Tensor,
    *,
    count: int,
    shortest: int,
    longest: int,
    num_tokens: int,
) -> torch.Tensor:
    """Guesses for the tokens after the newest ones: int32 [F, count].

    They follow the latest of the longest earlier occurrences of the last tokens, and go on from
    its beginning where that reaches the end; without any occurrence they repeat the newest token.

    Args:
        token_pool: int32 [slots, positions].
        slots: int64 [F].
        newest: int64 [F], the position of each slot's last token.
        count: guesses per row.
        shortest: tokens that must have occurred before.
        longest: tokens that are compared; longer occurrences count as much.
        num_tokens: more than any of `newest`, on the host.
    """
    return _DRAFT.select(token_pool)(
        token_pool, slots, newest, count, shortest, longest, num_tokens
    )


__all__ = ["draft_ngrams"]
