"""Quantization of activations to FP8 (e4m3), for products with FP8 weights."""

from __future__ import annotations

import torch

from kernels.quantize_fp8 import reference
from kernels.quantize_fp8.base import Fp8Rows
from kernels.registry import registry

_QUANTIZE_FP8 = registry.register(
    "quantize_fp8",
    reference.quantize_fp8,
    triton="kernels.quantize_fp8.triton_kernel:quantize_fp8",
)


def quantize_fp8(x: torch.Tensor, *, by_block: bool) -> Fp8Rows:
    """Quantizes rows [T, K] to e4m3, with scales that map the largest magnitude to 448.

    Args:
        x: [T, K].
        by_block: whether each block of 128 features has a scale, instead of each row.
    """
    return _QUANTIZE_FP8.select(x)(x, by_block)


__all__ = ["Fp8Rows", "quantize_fp8"]
