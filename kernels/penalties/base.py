"""Which rows of a step are penalised, and how strongly."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class PenaltyRows:
    """The rows of a step's logits that penalties apply to, [n] each."""

    rows: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor
    """How many tokens each has."""
    longest: int
    """The largest of them."""
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor
