"""The parts of log-probabilities of given tokens, without a row of log-probabilities."""

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
    """Scores of tokens [n] int64 under fp32 logits [n, vocab].

    The normaliser is a sum of integers and does not depend on the order in which it is added:
    log-probability = own - best - log(weight / 2**WEIGHT_BITS).
    """
    return _SCORE.select(logits)(logits, tokens)


__all__ = ["TokenScores", "token_scores"]
