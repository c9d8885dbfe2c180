"""The forms in which linear weights are held and multiplied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch


class BlockScales(NamedTuple):
    """Scales of FP8 weights [..., N, K]."""

    scales: torch.Tensor
    """fp32 [..., N, blocks], contiguous; feature k has that of block (k + offset) // block."""
    block: int
    """Input features that share a scale."""
    offset: int
    """Features of the first block that stand before the first one here."""


class PackedLinear(ABC):
    """A linear weight [N, K], packed once and multiplied many times."""

    out_features: int
    in_features: int

    @abstractmethod
    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x [T, K] times the transposed weight, plus bias [N]: [T, N]."""
