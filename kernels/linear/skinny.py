"""16-bit weights on CUDA whose matmuls with few rows are split over input features (split-K).

A matmul of few rows takes as long as reading the weight. cuBLAS computes it in tiles of 64 or more
output features without split-K, so a weight of 4,096 output features occupies half of an H100. For
three of the four matmuls in a layer of an 8B model, it was measured to use 47 to 65 % of the memory
bandwidth.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from kernels.linear.packed_codes import TILE_COLUMNS, TILE_DEPTH
from kernels.linear.plain import PlainWeight

_MOST_ROWS = 128
"""Maximum number of rows for which matmuls are split; with more rows, they are compute-bound
(estimated, not measured)."""
_LEAST_DEPTH = 1024
"""Minimum number of input features: with fewer, a matmul takes no longer than its launch."""


def is_skinny(weight: torch.Tensor, num_processors: int) -> bool:
    """Whether matmuls of few rows with a weight [N, K] would leave multiprocessors idle, and the
    kernel supports its sizes and layout.

    Args:
        num_processors: number of multiprocessors of its device.
    """
    columns, depth = weight.shape
    return (
        weight.dtype.itemsize == 2
        and weight.stride(1) == 1
        and depth >= _LEAST_DEPTH
        and depth % TILE_DEPTH == 0
        and columns % TILE_COLUMNS == 0
        and columns // TILE_COLUMNS < num_processors
    )


class SkinnyWeight(PlainWeight):
    """An unpacked weight on CUDA, which a Triton kernel multiplies if there are few rows.

    Args:
        weight: the weight [N, K], with sizes as in `is_skinny`.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        from kernels.linear.triton_split import count_arrivals

        super().__init__(weight)
        self._arrived = count_arrivals(weight.device)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Computes any number of rows in one launch."""
        if len(x) > _MOST_ROWS:
            return linear(x, self._weight, bias)
        from kernels.linear.triton_skinny import multiply_few

        return multiply_few(x, self._weight, bias, self._arrived)
