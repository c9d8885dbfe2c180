"""Frequency, presence and repetition penalties, from counts of tokens on the device."""

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
    """Penalizes fp32 logits [R, vocab] in place, at the tokens of the requests; other logits are
    not written. The repetition penalty comes first, as in vLLM.

    Args:
        logits: fp32 [R, vocab].
        rows: penalized rows and their penalties.
        in_prompt: bool [slots, vocab]: whether the prompt has a token.
        counts: int32 [slots, vocab]: occurrences of each token in the output, without drafts.
        token_pool: int32 [slots, positions]: prompt, output and drafts; a row's drafts count as
            output.
    """
    _APPLY.select(logits)(logits, rows, in_prompt, counts, token_pool)


def count_tokens_(counts: torch.Tensor, rows: PenaltyRows, tokens: torch.Tensor) -> None:
    """Adds sampled tokens, int64 [R], of the penalized rows to `counts` [slots, vocab]."""
    _COUNT.select(counts)(counts, rows, tokens)


__all__ = ["PenaltyRows", "apply_penalties_", "count_tokens_"]
