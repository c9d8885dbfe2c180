"""Token scores: terms of the log-probabilities of given tokens, computed without those of the whole
vocabulary."""

from __future__ import annotations

import torch

from kernels.registry import op
from kernels.sample_tokens.thresholds import total_weight
from kernels.token_scores.base import TokenScores


@op
def token_scores(logits: torch.Tensor, tokens: torch.Tensor) -> TokenScores:
    """Scores of tokens, int64 [n], under fp32 logits [n, vocab].

    The log-probability is token_logits - best - log(weight / 2**WEIGHT_BITS). The normalizer is a
    sum of integers, which does not depend on the order of additions.
    """
    token_logits = logits.gather(1, tokens.unsqueeze(1))
    return TokenScores(
        token_logits=token_logits.squeeze(1),
        best=logits.amax(dim=-1),
        weight=total_weight(logits),
        rank=(logits >= token_logits).sum(dim=-1),
    )


__all__ = ["TokenScores", "token_scores"]
