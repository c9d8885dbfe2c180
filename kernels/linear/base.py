"""Packed linear weights: their interface, and scales of quantized ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch

from kernels.quantize_fp8.base import Fp8Inputs

WeightCode = Literal["e4m3", "e2m1", "int8", "uint4", "uint4b8", "uint8", "uint8b128"]
"""Storage formats of quantized weights. Floats are named by their exponent and mantissa bits.
Integers with the suffix b8 or b128 are stored with that bias."""
HALF_BYTES: frozenset[WeightCode] = frozenset({"e2m1", "uint4", "uint4b8"})
"""Formats of 4-bit codes, two per byte, the first one in the low bits."""


class BlockScales(NamedTuple):
    """Scales and zero points of weights [..., N, K]: (code - zero point) * scale is the value."""

    scales: torch.Tensor
    """fp32 [..., N, blocks], contiguous: scales; input feature k is in block
    (k + offset) // block."""
    block: int
    """Number of input features per block."""
    offset: int
    """Number of input features of the first block that precede feature 0 of this weight."""
    code: WeightCode = "e4m3"
    """Storage format of the codes."""
    zeros: torch.Tensor | None = None
    """uint8 [..., N, blocks], contiguous: zero points; None if unused."""
    rows: int = 1
    """Number of adjacent output features that share their scales, starting with the first one."""


class PackedLinear(ABC):
    """A linear weight [N, K] that is packed once and multiplied many times."""

    out_features: int
    in_features: int
    fp8_inputs: Fp8Inputs | None = None
    """Format of FP8 rows that `linear` also accepts; None if it only accepts unquantized ones."""

    @abstractmethod
    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiplies x [T, K] by the transposed weight, and adds bias [N]: [T, N]."""
