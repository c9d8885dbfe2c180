"""Experts with random weights, in FP8 too."""

from __future__ import annotations

import torch

from kernels.fused_moe import Experts, ExpertWeights
from kernels.linear import BlockScales, dequantize_fp8


def make_experts(
    count: int, *, hidden: int, inner: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Experts:
    gate_up = torch.randn(count, 2 * inner, hidden) * hidden**-0.5
    down = torch.randn(count, hidden, inner) * inner**-0.5
    return Experts(ExpertWeights(gate_up.to(device, dtype)), ExpertWeights(down.to(device, dtype)))


def make_fp8_experts(
    count: int, *, hidden: int, inner: int, device: str = "cpu", dtype: torch.dtype
) -> tuple[Experts, Experts]:
    """Experts in FP8, with blocks that begin before the first feature and end after the last, and
    what they are dequantized to."""
    quantized, dequantized = [], []
    for weights in make_experts(count, hidden=hidden, inner=inner):
        values = (weights.values * 100.0).to(device, torch.float8_e4m3fn)
        blocks = (values.shape[2] + 20) // 32 + 1
        scales = (torch.rand(*values.shape[:2], blocks) * 0.01 + 0.005).to(device)
        scaling = BlockScales(scales, 32, 20)
        quantized.append(ExpertWeights(values, scaling))
        dequantized.append(ExpertWeights(dequantize_fp8(values, scaling, dtype=dtype)))
    return Experts(*quantized), Experts(*dequantized)
