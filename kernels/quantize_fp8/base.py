"""Rows quantized to FP8."""

from __future__ import annotations

from typing import NamedTuple

import torch

LARGEST = 448.0
"""Largest number in e4m3."""
LEAST_MAXIMUM = 1e-10
"""Minimum of the maximum that determines a scale, for groups of zeros."""
BLOCK = 128
"""Features that share a scale if rows have several: DeepSeek's blocks of 1 x 128."""
_ROWS = 16
"""Rows are padded to a multiple of it: cuBLASLt reads scales of blocks by 16 bytes or more."""


class Fp8Rows(NamedTuple):
    """Rows [T, K] in FP8: code * scale is the value. T is padded to a multiple of 16 and K to a
    multiple of 128, with zeros."""

    codes: torch.Tensor
    """e4m3 [T, K], contiguous; of each four features the two in the middle are swapped, as in
    words of weights (`kernels.linear.packed_codes`)."""
    scales: torch.Tensor
    """fp32 [T, K / 128], adjacent along T: scales of blocks of 128 features; or [T, 1]."""


def padded_rows(count: int) -> int:
    """Number of rows with padding."""
    return -(-count // _ROWS) * _ROWS


def padded_depth(count: int) -> int:
    """Number of features with padding."""
    return -(-count // BLOCK) * BLOCK
