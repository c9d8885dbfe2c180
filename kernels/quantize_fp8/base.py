"""Rows quantized to FP8."""

from __future__ import annotations

from typing import NamedTuple

import torch

LARGEST = 448.0
"""Largest number in e4m3."""
LEAST_MAXIMUM = 1e-10
"""Lower bound of the largest magnitude in a group, so that the scale of a group of zeros is not 0.
"""
BLOCK = 128
"""Number of features that share a scale if rows have several: DeepSeek's blocks of 1 x 128."""
_ROWS = 16
"""Rows are padded to a multiple of this: cuBLASLt reads at least 16 bytes of block scales at a
time."""


class Fp8Inputs(NamedTuple):
    """Format of FP8 rows that a matmul reads."""

    by_block: bool
    """Whether each block of 128 features has a scale, rather than each row."""
    min_rows: int
    """Minimum number of rows for which FP8 rows are used."""


class Fp8Rows(NamedTuple):
    """Rows [T, K] in FP8: code * scale is the value. T is padded to a multiple of 16 and K to a
    multiple of 128, with zeros."""

    codes: torch.Tensor
    """e4m3 [T, K], contiguous; the middle two of each four features are swapped, as in
    words of weights (`kernels.linear.packed_codes`)."""
    scales: torch.Tensor
    """fp32 [T, K / 128], with stride 1 along T: scales of blocks of 128 features; or [T, 1], with
    both strides 1, as `scaled_mm` requires."""
    num_rows: int
    """Number of rows without padding."""


def empty_rows(count: int, features: int, *, by_block: bool, device: torch.device) -> Fp8Rows:
    """Rows with unset codes and scales.

    Args:
        count: number of rows without padding.
        features: number of features without padding.
        by_block: whether each block of 128 features has a scale, rather than each row.
        device: device of the rows.
    """
    rows, depth = padded_rows(count), padded_depth(features)
    codes = torch.empty(rows, depth, dtype=torch.float8_e4m3fn, device=device)
    if by_block:
        scales = torch.empty(depth // BLOCK, rows, dtype=torch.float32, device=device).t()
    else:
        scales = torch.empty(rows, 1, dtype=torch.float32, device=device)
    return Fp8Rows(codes, scales, count)


def padded_rows(count: int) -> int:
    """Number of rows with padding."""
    return -(-count // _ROWS) * _ROWS


def padded_depth(count: int) -> int:
    """Number of features with padding."""
    return -(-count // BLOCK) * BLOCK
