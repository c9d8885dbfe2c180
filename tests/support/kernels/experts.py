"""Experts with random weights, and weights of all codes."""

from __future__ import annotations

import math

import torch

from kernels.fused_moe import Experts, ExpertWeights
from kernels.linear import BlockScales, WeightCode, dequantize
from kernels.linear.base import HALF_BYTES


def make_experts(
    count: int, *, hidden: int, inner: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Experts:
    gate_up = torch.randn(count, 2 * inner, hidden) * hidden**-0.5
    down = torch.randn(count, hidden, inner) * inner**-0.5
    return Experts(ExpertWeights(gate_up.to(device, dtype)), ExpertWeights(down.to(device, dtype)))


def make_codes(
    *shape: int,
    code: WeightCode,
    device: str = "cpu",
    scale: float = 1.0,
    block: int = 32,
    offset: int = 16,
) -> tuple[torch.Tensor, BlockScales]:
    """All codes of weights [..., N, K] in turn, by default with blocks that start before the first
    feature and end after the last; K is even."""
    *rows, depth = shape
    per_byte = 2 if code in HALF_BYTES else 1
    count = math.prod(rows) * depth // per_byte
    codes = (torch.arange(count) * 37 % 256).to(torch.uint8).view(*rows, depth // per_byte)
    if code == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0  # not a number
    blocks = (depth + offset - 1) // block + 1
    scales, zeros = (torch.rand(*rows, blocks) + 0.5) * scale, None
    if code in ("uint4", "uint8"):
        zeros = torch.randint(16, (*rows, blocks), dtype=torch.uint8).to(device)
    return codes.to(device), BlockScales(scales.to(device), block, offset, code, zeros)


def make_quantized_experts(
    count: int,
    *,
    hidden: int,
    inner: int,
    code: WeightCode = "e4m3",
    device: str = "cpu",
    dtype: torch.dtype,
) -> tuple[Experts, Experts]:
    """Quantized experts, not packed yet, and the dequantized ones."""
    quantized, dequantized = [], []
    for rows, columns in ((2 * inner, hidden), (hidden, inner)):
        codes, scaling = make_codes(count, rows, columns, code=code, device=device, scale=0.001)
        quantized.append(ExpertWeights(codes, scaling))
        dequantized.append(ExpertWeights(dequantize(codes, scaling, dtype=dtype)))
    return Experts(*quantized), Experts(*dequantized)
