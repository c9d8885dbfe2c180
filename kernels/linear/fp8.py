"""FP8 weights with a scale for each block of input features of a row."""

from __future__ import annotations

import torch

from kernels.linear.base import PackedLinear


def dequantize_fp8(
    values: torch.Tensor, scales: torch.Tensor, block: int, offset: int, *, dtype: torch.dtype
) -> torch.Tensor:
    """The weight [N, K] in `dtype`: each value times its scale, rounded once.

    Args:
        values: float8_e4m3fn [N, K].
        scales: fp32 [N, blocks]; feature k has that of block (k + offset) // block.
        block: input features that share a scale.
        offset: features of the first block that stand before the first one here.
        dtype: of the result.
    """
    columns = torch.arange(values.shape[1], device=values.device).add_(offset) // block
    return (values.float() * scales.index_select(1, columns)).to(dtype)


class TritonFp8Weight(PackedLinear):
    """FP8 in memory, dequantized tile by tile in the product of fixed tiles: bit for bit what that
    makes of the dequantized weight. Arguments as of `dequantize_fp8`."""

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, block: int, offset: int) -> None:
        self.out_features, self.in_features = values.shape
        self._bits = values.view(torch.uint8)
        self._scales = scales.contiguous()
        self._block = block
        self._offset = offset

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """One launch for all rows, whose results do not depend on each other."""
        from kernels.linear.triton_kernel import BlockScales, matmul_fixed_tiles

        scaling = BlockScales(self._scales, self._block, self._offset)
        return matmul_fixed_tiles(x, self._bits, bias, scaling)
