"""Scores of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TokenScores(NamedTuple):
    """Scores of n tokens, [n] each."""

    token_logits: torch.Tensor
    """fp32: logits of the tokens."""
    best: torch.Tensor
    """fp32: largest logits of the rows."""
    weight: torch.Tensor
    """int64: sum over the vocabulary of exp(logit - best), in fixed point."""
    rank: torch.Tensor
    """int64: 1-based ranks of the tokens: number of logits that are at least the token's."""
