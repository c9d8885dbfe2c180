"""Results of scoring tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TokenScores(NamedTuple):
    """[n] each."""

    own: torch.Tensor
    """fp32: logits of the tokens."""
    best: torch.Tensor
    """fp32: largest logits."""
    weight: torch.Tensor
    """int64: sum over the vocabulary of exp(logit - best), in fixed point."""
    rank: torch.Tensor
    """int64: how many logits are at least the token's."""
