"""Unpacked weights, whose matmuls run in torch."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from kernels.linear.base import PackedLinear


class PlainWeight(PackedLinear):
    """An unpacked weight, used on CUDA, and on CPU if oneDNN does not support its dtype."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Computes one matmul of all rows."""
        return linear(x, self._weight, bias)
