"""Penalized rows of a step, and their penalties."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class PenaltyRows:
    """Rows of a step's logits to which penalties apply, [n] each."""

    rows: torch.Tensor
    """int64: rows of the logits."""
    slots: torch.Tensor
    """int64: slots of the requests."""
    ends: torch.Tensor
    """int64: number of tokens before the new one."""
    num_drafts: torch.Tensor
    """int64: number of trailing tokens that are drafts, which are not in `counts` yet."""
    most_drafts: int
    """Largest of `num_drafts`."""
    frequency: torch.Tensor
    """fp32: frequency penalties."""
    presence: torch.Tensor
    """fp32: presence penalties."""
    repetition: torch.Tensor
    """fp32: repetition penalties."""
