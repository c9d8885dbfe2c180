"""Torch reference of token scores."""

from __future__ import annotations

import torch

from kernels.sample_tokens.thresholds import total_weight
from kernels.token_scores.base import TokenScores


def token_scores(logits: torch.Tensor, tokens: torch.Tensor) -> TokenScores:
    """Computes each score by a pass over the logits."""
    token_logits = logits.gather(1, tokens.unsqueeze(1))
    return TokenScores(
        token_logits=token_logits.squeeze(1),
        best=logits.amax(dim=-1),
        weight=total_weight(logits),
        rank=(logits >= token_logits).sum(dim=-1),
    )
