"""Triton quantization of rows to FP8, in one launch, or in the kernel that computes them."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.quantize_fp8 import reference
from kernels.quantize_fp8.base import BLOCK, LARGEST, LEAST_MAXIMUM, Fp8Rows, empty_rows
from kernels.registry import implements
from kernels.tiles import cdiv, next_power_of_2

_LARGEST, _LEAST_MAXIMUM = tl.constexpr(LARGEST), tl.constexpr(LEAST_MAXIMUM)
_BLOCKED_WIDTH = 1024
"""Number of features per program if blocks have separate scales."""
_WARP_WIDTH = 1024
"""Number of features per warp: 32 per thread."""
_MOST_WARPS = 16


@implements(reference.quantize_fp8, "triton")
def quantize_fp8(x: torch.Tensor, *, by_block: bool) -> Fp8Rows:
    """Launches a grid of (rows, blocks of columns); with one scale per row, a row is one block."""
    rows, features = x.shape
    out = empty_rows(rows, features, by_block=by_block, device=x.device)
    if x.stride(1) != 1:
        x = x.contiguous()
    count, depth = out.codes.shape
    width = program_width(depth, by_block=by_block)
    if rows:
        _quantize_kernel[(count, cdiv(depth, width))](
            x, out.codes, out.scales, rows, count, x.stride(0),
            FEATURES=features, DEPTH=depth, GROUP=BLOCK if by_block else width, WIDTH=width,
            num_warps=count_fp8_warps(width),
        )  # fmt: skip
    return out


def program_width(depth: int, *, by_block: bool) -> int:
    """Number of features per program for rows of `depth` features."""
    return _BLOCKED_WIDTH if by_block else next_power_of_2(depth)


def count_fp8_warps(width: int) -> int:
    """Number of warps per program for `width` features."""
    return min(cdiv(width, _WARP_WIDTH), _MOST_WARPS)


# Not specialized on the number of rows.
@dependent_kernel(do_not_specialize=["rows", "count"])
def _quantize_kernel(
    x_ptr, code_ptr, scale_ptr, rows, count, x_stride,
    FEATURES: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = (column < FEATURES) & (row < rows)
    x = tl.load(x_ptr + row * x_stride + column, mask=there, other=0.0).to(tl.float32)
    store_fp8(x, code_ptr, scale_ptr, row, tl.program_id(1), count, DEPTH, GROUP, WIDTH)


@triton.jit
def store_fp8(
    x, code_ptr, scale_ptr, row, part, count,
    DEPTH: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Quantizes a block of columns of a row, and stores its codes and scales.

    Args:
        x: fp32 [WIDTH]: values of the block, zeros past the last feature and past the last row.
        code_ptr: pointer to `Fp8Rows.codes`; scale_ptr points to `Fp8Rows.scales`.
        row: index of the row.
        part: index of the block.
        count: number of rows with padding.
        DEPTH: number of features with padding.
        GROUP: features that share a scale.
        WIDTH: features per block.
    """
    groups: tl.constexpr = WIDTH // GROUP
    x = tl.reshape(x, (groups, GROUP))
    largest = tl.maximum(tl.max(tl.abs(x), axis=1), _LEAST_MAXIMUM)
    group = part * groups + tl.arange(0, groups)
    scale = largest / _LARGEST
    tl.store(scale_ptr + group * count + row, scale, mask=group * GROUP < DEPTH)
    codes = tl.reshape(x * (1.0 / scale)[:, None], (WIDTH // 4, 2, 2))
    codes = tl.reshape(tl.permute(codes, 0, 2, 1), (WIDTH,))
    column = part * WIDTH + tl.arange(0, WIDTH)
    tl.store(code_ptr + row * DEPTH + column, codes.to(tl.float8e4nv), mask=column < DEPTH)
