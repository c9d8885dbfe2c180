"""FP8 weights on CUDA, multiplied by FP8 activations if there are many rows.

Up to 128 rows, a matmul is bound by weight bandwidth, and weights are dequantized to bfloat16 as in
other formats. More rows are quantized, with a scale per token if the weight has scales per output
feature, and with a scale per block of 128 features if it has scales per block; cuBLASLt or CUTLASS
then multiplies FP8 by FP8. Norms and activation functions quantize their results for the next
matmul; other rows need a separate quantization launch. Scales of activations in a checkpoint are
not used: per-token scales are at least as accurate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import ScalingType, scaled_mm

from kernels.linear.packed_codes import PackedCodes
from kernels.linear.quantized import TritonQuantizedWeight
from kernels.quantize_fp8 import Fp8Inputs, Fp8Rows, quantize_fp8

FP8_CAPABILITY = (8, 9)
"""Minimum compute capability for FP8 matmuls."""
_BLOCK_CAPABILITY = 9
"""Major compute capability (Hopper) for which cuBLASLt has matmuls with scales per block."""
_BLOCK = 128
"""Number of input features per block, and of output features per block."""
_WEIGHT_ONLY_ROWS = 128
"""Maximum number of rows for which weights are dequantized to bfloat16 and rows are not quantized.
Estimated: vLLM measured cuBLASLt to be 2.2 times slower than DeepGEMM up to 64 rows, and as fast
for 1,024 or more (vllm#49932)."""


class ProductScales(NamedTuple):
    """Scales of a weight [N, K] in the layout that `scaled_mm` reads."""

    values: torch.Tensor
    """fp32 [1, N], or of blocks [K / 128, N / 128], where the first dimension is padded to a
    multiple of 4 and has stride 1."""
    by_block: bool
    """Whether there is one scale per block of 128 by 128 features."""


def product_scales(
    weight: PackedCodes, dtype: torch.dtype, capability: tuple[int, int]
) -> ProductScales | None:
    """Scales for matmuls with FP8 activations. None if such matmuls are not supported: for inputs
    other than bfloat16, below compute capability 8.9, for a number of output features that is not a
    multiple of 16, for blocks other than 128 by 128, and for blocks on GPUs other than Hopper.

    Args:
        weight: the packed weight.
        dtype: data type of the inputs.
        capability: compute capability of the GPU.
    """
    (columns, depth), group = weight.shape, weight.group
    if weight.code != "e4m3" or dtype != torch.bfloat16 or capability < FP8_CAPABILITY:
        return None
    if group == 0:
        scales = weight.scales.flatten()[:columns].unsqueeze(0)
        return None if columns % 16 else ProductScales(scales, by_block=False)
    if group != _BLOCK or capability[0] != _BLOCK_CAPABILITY or columns % _BLOCK or depth % _BLOCK:
        return None
    if weight.shared_rows % _BLOCK:
        return None  # such as a fused weight whose parts are not whole blocks
    # [blocks of columns, tiles of a block, blocks of features, columns of a tile]
    blocks = weight.scales.squeeze(-1).unflatten(0, (columns // _BLOCK, -1))[:, 0, :, 0]
    padded = torch.nn.functional.pad(blocks, (0, -blocks.shape[1] % 4))
    return ProductScales(padded.t(), by_block=True)


class Fp8Weight(TritonQuantizedWeight):
    """An FP8 weight on CUDA, used in FP8 matmuls if there are many rows.

    Args:
        weight: the packed weight [N, K].
        scales: its scales for `scaled_mm`.
    """

    fp8_inputs: Fp8Inputs
    """Format of the rows that `multiply_fp8` accepts."""

    def __init__(self, weight: PackedCodes, scales: ProductScales) -> None:
        super().__init__(weight)
        self.fp8_inputs = Fp8Inputs(scales.by_block, _WEIGHT_ONLY_ROWS + 1)
        self._codes = weight.words.view(torch.float8_e4m3fn)[: self.out_features]
        self._scales = scales

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Computes up to 128 rows in one launch; more are quantized first."""
        by_block, min_rows = self.fp8_inputs
        if len(x) < min_rows:
            return super().multiply(x, bias)
        return self.multiply_fp8(quantize_fp8(x, by_block=by_block), bias)

    def multiply_fp8(self, rows: Fp8Rows, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiplies quantized rows [T, K] by the transposed weight, and adds bias [N]: bfloat16
        [T, N]."""
        by_block = self._scales.by_block
        out = scaled_mm(
            rows.codes,
            self._codes.t(),
            rows.scales,
            ScalingType.BlockWise1x128 if by_block else ScalingType.RowWise,
            self._scales.values,
            ScalingType.BlockWise128x128 if by_block else ScalingType.RowWise,
            output_dtype=torch.bfloat16,
            # With a scale per row, Hopper accumulates at lower precision, as in vLLM.
            use_fast_accum=not by_block,
        )[: rows.num_rows]
        return out if bias is None else out.add_(bias)
