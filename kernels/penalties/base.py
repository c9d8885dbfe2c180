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
    num_drafts: torch.Tensor
    """int64: of its tokens the last so many are drafts, which `counts` does not hold yet."""
    longest: int
    """The largest of `ends`."""
    most_drafts: int
    """The largest of `num_drafts`."""
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor
