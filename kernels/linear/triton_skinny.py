"""Triton matmul of few rows with a 16-bit weight, split over input features.

A program multiplies tiles of weights, the first operand, by all rows.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from kernels.attention.triton_config import compute_capability
from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.linear.packed_codes import TILE_COLUMNS
from kernels.linear.triton_split import new_parts, split_steps, store_sum
from kernels.tiles import cdiv


class _Sizes(NamedTuple):
    """Tile sizes and launch parameters."""

    rows: int
    depth: int
    stages: int


_SIZES = (_Sizes(16, 128, 4), _Sizes(32, 128, 4), _Sizes(64, 128, 3), _Sizes(128, 64, 4))
"""Tile sizes in ascending order; the first with enough rows is used. All stages but one are
prefetched: 24 to 48 KiB of weights, within the 99 KiB of shared memory of compute capability 8.9.
Not tuned on a GPU."""
_WARPS = 4
_BLACKWELL, _BLACKWELL_WARPS = 100, 8
"""Minimum compute capability at which the largest tiles have eight warps: with four, they spill 40
bytes."""


def multiply_few(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor
) -> torch.Tensor:
    """Multiplies x [M, K] by the transposed weight [N, K] with fp32 accumulation, and adds bias
    [N]: [M, N].

    Equal inputs give bitwise equal results, which depend on the number of rows.

    Args:
        x: [M, K]: inputs, with at most 128 rows.
        weight: [N, K], divisible into whole tiles.
        bias: [N]; None if unused.
        arrived: counters of the weight, from `count_arrivals`.
    """
    (rows, depth), columns = x.shape, weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    sizes = next(sizes for sizes in _SIZES if rows <= sizes.rows)
    tiles, num_steps = columns // TILE_COLUMNS, depth // sizes.depth
    steps = split_steps(tiles, num_steps, x.device)
    splits = cdiv(num_steps, steps)
    _skinny_matmul_kernel[(tiles, splits)](
        x, weight, out if bias is None else bias, out,
        new_parts(tiles, splits, sizes.rows * TILE_COLUMNS, arrived), arrived,
        rows, columns, x.stride(0), weight.stride(0), num_steps, steps,
        HAS_BIAS=bias is not None, BLOCK_M=sizes.rows, BLOCK_N=TILE_COLUMNS, BLOCK_K=sizes.depth,
        num_warps=_count_warps(sizes), num_stages=sizes.stages,
    )  # fmt: skip
    return out


def _count_warps(sizes: _Sizes) -> int:
    """Number of warps per program."""
    is_large = sizes == _SIZES[-1]
    return _BLACKWELL_WARPS if is_large and compute_capability() >= _BLACKWELL else _WARPS


# Not specialized on the numbers of rows and steps: one binary serves all weights.
@dependent_kernel(do_not_specialize=["rows", "num_steps", "steps"])
def _skinny_matmul_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    rows, columns, x_stride, weight_stride, num_steps, steps,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    tile, first = tl.program_id(0), tl.program_id(1) * steps
    row, k = tl.arange(0, BLOCK_M).to(tl.int64), tl.arange(0, BLOCK_K)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    weights = weight_ptr + (column.to(tl.int64) * weight_stride)[:, None] + k[None, :]
    x = x_ptr + (row * x_stride)[None, :] + k[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first, tl.minimum(first + steps, num_steps)):
        part = tl.load(x + step * BLOCK_K, mask=(row < rows)[None, :], other=0.0)
        total = tl.dot(tl.load(weights + step * BLOCK_K), part, total)
    store_sum(
        total, tile, row, column, rows, columns, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
        HAS_BIAS, BLOCK_M, BLOCK_N,
    )  # fmt: skip
