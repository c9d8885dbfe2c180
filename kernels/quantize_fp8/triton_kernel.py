"""Triton quantization of rows to FP8, in one launch."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.quantize_fp8 import reference
from kernels.quantize_fp8.base import (
    BLOCK,
    LARGEST,
    LEAST_MAXIMUM,
    Fp8Rows,
    padded_depth,
    padded_rows,
)
from kernels.registry import implements
from kernels.tiles import cdiv, next_power_of_2

_LARGEST, _LEAST_MAXIMUM = tl.constexpr(LARGEST), tl.constexpr(LEAST_MAXIMUM)
_BLOCKED_WIDTH = 1024
"""Features per program if blocks have separate scales."""
_WARP_WIDTH = 1024
"""Features per warp of a program: 32 per thread."""
_MOST_WARPS = 16


@implements(reference.quantize_fp8, "triton")
def quantize_fp8(x: torch.Tensor, *, by_block: bool) -> Fp8Rows:
    """Launches a grid of (rows, parts of a row); a row with one scale is one part."""
    (rows, features), device = x.shape, x.device
    count, depth = padded_rows(rows), padded_depth(features)
    groups = depth // BLOCK if by_block else 1
    codes = torch.empty(count, depth, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(groups, count, dtype=torch.float32, device=device)
    if x.stride(1) != 1:
        x = x.contiguous()
    width = _BLOCKED_WIDTH if by_block else next_power_of_2(depth)
    if rows:
        _quantize_kernel[(count, cdiv(depth, width))](
            x, codes, scales, rows, count, x.stride(0),
            FEATURES=features, DEPTH=depth, GROUP=BLOCK if by_block else width, WIDTH=width,
            num_warps=min(cdiv(width, _WARP_WIDTH), _MOST_WARPS),
        )  # fmt: skip
    return Fp8Rows(codes, scales.t())


# Not specialised on the number of rows.
@triton.jit(do_not_specialize=["rows", "count"])
def _quantize_kernel(
    x_ptr, code_ptr, scale_ptr, rows, count, x_stride,
    FEATURES: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = (column < FEATURES) & (row < rows)
    x = tl.load(x_ptr + row * x_stride + column, mask=there, other=0.0).to(tl.float32)
    groups: tl.constexpr = WIDTH // GROUP
    x = tl.reshape(x, (groups, GROUP))
    largest = tl.maximum(tl.max(tl.abs(x), axis=1), _LEAST_MAXIMUM)
    group = tl.program_id(1) * groups + tl.arange(0, groups)
    scale = largest / _LARGEST
    tl.store(scale_ptr + group * count + row, scale, mask=group * GROUP < DEPTH)
    codes = tl.reshape(x * (1.0 / scale)[:, None], (WIDTH // 4, 2, 2))
    codes = tl.reshape(tl.permute(codes, 0, 2, 1), (WIDTH,))
    tl.store(code_ptr + row * DEPTH + column, codes.to(tl.float8e4nv), mask=column < DEPTH)
