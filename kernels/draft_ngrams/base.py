"""The inputs of prompt lookup."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramLookup:
    """Which F rows are to be guessed on, how far, and by what occurrences."""

    slots: torch.Tensor
    """[F] int64: their rows of the token pool."""
    newest: torch.Tensor
    """[F] int64: the position of each one's last token."""
    count: int
    """Guesses per row."""
    shortest: int
    """Tokens that must have occurred before."""
    longest: int
    """Tokens that are compared; longer occurrences count as much."""
    num_tokens: int
    """More than any of `newest`, on the host."""
