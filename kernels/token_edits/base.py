"""Edits of single logits, by slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NONE = -1
"""Stands for no edit, and before an edit for any token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEdits:
    """Up to E edits per slot: add a value to a token's logit where given tokens were drawn last."""

    tokens: torch.Tensor
    """[slots, E] int32, NONE beyond a slot's edits. A slot names a token with a finite value at
    most once."""
    values: torch.Tensor
    """[slots, E] fp32, finite or -inf."""
    before: torch.Tensor
    """[slots, E, L] int32: what must stand before the new token, aligned at the end; NONE fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EditRows:
    """The rows of a step's logits that are edited, int64 [n] each."""

    rows: torch.Tensor
    slots: torch.Tensor
    cells: torch.Tensor
    """Places of the new tokens in the flat token pool."""
    num_output: torch.Tensor
    """Tokens generated before them: no others count as drawn."""
