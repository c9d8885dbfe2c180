"""Weights of 16 bits on CUDA whose products with few rows are split over input features.

A product of few rows takes as long as reading the weight. cuBLAS computes it in tiles of 64 output
features or more without splitting, and a weight of 4,096 output features occupies half of an H100:
47 to 65 % of the bandwidth, measured, for three of the four products of an 8B model's layer.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from kernels.linear.packed_codes import TILE_COLUMNS, TILE_DEPTH
from kernels.linear.plain import PlainWeight

_MOST_ROWS = 128
"""Rows up to which products are split; more are bound by arithmetic. Estimated."""
_LEAST_DEPTH = 1024
"""Minimum input features: with fewer, a product takes no longer than its launch."""


def is_skinny(weight: torch.Tensor, num_processors: int) -> bool:
    """Whether products of a weight [N, K] with few rows would leave multiprocessors idle, and its
    sizes and layout are those of the kernel.

    Args:
        weight: the weight.
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
    """An unpacked weight on CUDA, multiplied by a Triton kernel if there are few rows.

    Args:
        weight: the weight [N, K], with sizes as in `is_skinny`.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        from kernels.linear.triton_split import count_arrivals

        super().__init__(weight)
        self._arrived = count_arrivals(weight.device)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """One launch for any number of rows."""
        if len(x) > _MOST_ROWS:
            return linear(x, self._weight, bias)
        from kernels.linear.triton_skinny import multiply_few

        return multiply_few(x, self._weight, bias, self._arrived)
