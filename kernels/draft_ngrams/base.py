"""Inputs of prompt lookup."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramLookup:
    """Lookup of drafts for F rows."""

    slots: torch.Tensor
    """[F] int64: rows of the token pool."""
    newest: torch.Tensor
    """[F] int64: positions of the newest tokens."""
    count: int
    """Number of drafts per row."""
    shortest: int
    """Minimum length of a match, in tokens."""
    longest: int
    """Maximum number of tokens that are compared; longer matches count as having this length."""
    num_tokens: int
    """Exclusive upper bound of `newest`, known on the host."""
