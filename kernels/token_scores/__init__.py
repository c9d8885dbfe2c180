"""Token scores: terms of the log-probabilities of given tokens, without those of the whole
vocabulary."""

from __future__ import annotations

import torch

from kernels.registry import registry
from kernels.token_scores import reference
from kernels.token_scores.base import TokenScores

_SCORE = registry.register(
    "token_scores",
    reference.token_scores,
    triton="kernels.token_scores.triton_kernel:token_scores",
)


def token_scores(logits: torch.Tensor, tokens: torch.Tensor) -> TokenScores:
    """Scores of tokens, int64 [n], under fp32 logits [n, vocab].

    The log-probability is token_logits - best - log(weight / 2**WEIGHT_BITS). The normalizer is a
    sum of integers, which does not depend on the order of additions.
    """
    return _SCORE.select(logits)(logits, tokens)


__all__ = ["TokenScores", "token_scores"]
