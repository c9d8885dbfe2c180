"""FP8 weights with a scale for each block of input features of a row."""

from __future__ import annotations

import torch

from kernels.linear.base import BlockScales, PackedLinear


def dequantize_fp8(
    values: torch.Tensor, scaling: BlockScales, *, dtype: torch.dtype
) -> torch.Tensor:
    """The weights [..., N, K] in `dtype`: each value, float8_e4m3fn, times its scale, rounded
    once."""
    columns = torch.arange(values.shape[-1], device=values.device).add_(scaling.offset)
    scales = scaling.scales.index_select(-1, columns // scaling.block)
    return (values.float() * scales).to(dtype)


class TritonFp8Weight(PackedLinear):
    """FP8 in memory, dequantized tile by tile in the product of fixed tiles: bit for bit what that
    makes of the dequantized weight.

    Args:
        values: float8_e4m3fn [N, K].
        scaling: of these.
    """

    def __init__(self, values: torch.Tensor, scaling: BlockScales) -> None:
        self.out_features, self.in_features = values.shape
        self._bits = values.view(torch.uint8)
        self._scaling = scaling

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """One launch for all rows, whose results do not depend on each other."""
        from kernels.linear.triton_kernel import matmul_fixed_tiles

        return matmul_fixed_tiles(x, self._bits, bias, self._scaling)
