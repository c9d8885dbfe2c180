"""Batch-invariant matmuls of tiles with a fixed shape."""

from __future__ import annotations

import torch

from kernels.linear.plain import PlainWeight

TILE_ROWS = 16
"""Number of rows per tile of the CPU matmul."""


class TiledWeight(PlainWeight):
    """An unpacked weight, multiplied by 16 rows at a time: all matmuls have one shape, so the order
    of summation is always the same."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Pads the rows to whole tiles, and multiplies tile by tile."""
        rows = x.shape[0]
        padded_rows = -(-rows // TILE_ROWS) * TILE_ROWS
        padded = x.new_zeros(padded_rows, self.in_features)
        padded[:rows] = x
        result = x.new_empty(padded_rows, self.out_features)
        for start in range(0, padded_rows, TILE_ROWS):
            tile = slice(start, start + TILE_ROWS)
            torch.mm(padded[tile], self._weight.t(), out=result[tile])
        result = result[:rows]
        return result if bias is None else result + bias


class TritonTiledWeight(PlainWeight):
    """An unpacked weight, whose matmuls run in a persistent Triton kernel with fixed tiles and
    without split-K."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Computes all rows in one launch."""
        from kernels.linear.triton_kernel import matmul_fixed_tiles

        return matmul_fixed_tiles(x, self._weight, bias)
