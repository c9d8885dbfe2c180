"""Frequency, presence and repetition penalties from counts on the device."""

from __future__ import annotations

import torch

from kernels.penalties import reference
from kernels.penalties.base import PenaltyRows
from kernels.registry import registry

_APPLY = registry.register(
    "apply_penalties_",
    reference.apply_penalties_,
    triton="kernels.penalties.triton_kernel:apply_penalties_",
)
_COUNT = registry.register(
    "count_tokens_",
    reference.count_tokens_,
    triton="kernels.penalties.triton_kernel:count_tokens_",
)


def apply_penalties_(
    logits: torch.Tensor,
    rows: PenaltyRows,
    in_prompt: torch.Tensor,
    counts: torch.Tensor,
    token_pool: torch.Tensor,
) -> None:
    """Penalise fp32 logits [R, vocab] in place, at the tokens that the rows hold: no others.

    `in_prompt` (bool) and `counts` (int32) are [slots, vocab]: the prompt's tokens, and how often
    the output holds each. `token_pool` [slots, positions] int32 holds both one after another; a
    row's drafts count as output. The repetition penalty comes first, as in vLLM.
    """
    _APPLY.select(logits)(logits, rows, in_prompt, counts, token_pool)


def count_tokens_(counts: torch.Tensor, rows: PenaltyRows, tokens: torch.Tensor) -> None:
    """Count the draws [R] int64 of the penalised rows in their slots' rows of `counts`."""
    _COUNT.select(counts)(counts, rows, tokens)


__all__ = ["PenaltyRows", "apply_penalties_", "count_tokens_"]
