"""The forms in which linear weights are held and multiplied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch

WeightCode = Literal["e4m3", "e2m1", "int8", "uint4", "uint4b8", "uint8", "uint8b128"]
"""Codes that a quantized weight is held as: floats with so many bits of exponent and mantissa, or
whole numbers, of which 8 or 128 is taken where the name ends so."""
HALF_BYTES: frozenset[WeightCode] = frozenset({"e2m1", "uint4", "uint4b8"})
"""Codes of which two are in a byte, the first in its low bits."""


class BlockScales(NamedTuple):
    """Scales of the codes of weights [..., N, K], which stand for (code - zero) * scale."""

    scales: torch.Tensor
    """fp32 [..., N, blocks], contiguous; feature k has that of block (k + offset) // block."""
    block: int
    """Input features that share a scale."""
    offset: int
    """Features of the first block that stand before the first one here."""
    code: WeightCode = "e4m3"
    """How values are written."""
    zeros: torch.Tensor | None = None
    """uint8 [..., N, blocks], contiguous: what is taken from a code; None where nothing is."""


class PackedLinear(ABC):
    """A linear weight [N, K], packed once and multiplied many times."""

    out_features: int
    in_features: int

    @abstractmethod
    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x [T, K] times the transposed weight, plus bias [N]: [T, N]."""
