"""Triton batch-invariant matmul, with fixed tiles and without split-K: one program sums over K in
order."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.tiles import cdiv


class _Tiles(NamedTuple):
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# Tile sizes depend on the data type and never on shapes, so that they are the same in every batch.
_TILES = {
    torch.float32: _Tiles(32, 64, 32, 4, 2),
    torch.bfloat16: _Tiles(64, 128, 64, 4, 3),
    torch.float16: _Tiles(64, 128, 64, 4, 3),
}
_INTERPRETER_PROCESSORS = 3


def matmul_fixed_tiles(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiplies x [M, K] by the transposed weight [N, K] with fp32 accumulation, and adds bias
    [N]: [M, N].

    Raises ValueError if there is no kernel for the dtype of x.
    """
    tiles = _TILES.get(x.dtype)
    if tiles is None:
        known = ", ".join(map(str, _TILES))
        raise ValueError(f"no batch-invariant matmul for {x.dtype}: use one of {known}")
    rows, depth = x.shape
    columns = weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    num_tiles = cdiv(rows, tiles.rows) * cdiv(columns, tiles.columns)
    _matmul_kernel[(min(num_tiles, num_processors(x.device)),)](
        x, weight, bias if bias is not None else weight, out, rows, columns, depth,
        x.stride(0), x.stride(1), weight.stride(0), weight.stride(1),
        HAS_BIAS=bias is not None,
        BLOCK_M=tiles.rows, BLOCK_N=tiles.columns, BLOCK_K=tiles.depth,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def num_processors(device: torch.device) -> int:
    """Number of multiprocessors; each runs one program of a persistent kernel."""
    if device.type != "cuda":
        return _INTERPRETER_PROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


# Not specialized on the number of rows: one binary serves all batches.
@dependent_kernel(do_not_specialize=["rows"])
def _matmul_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, columns, depth,
    x_row_stride, x_depth_stride, weight_row_stride, weight_depth_stride,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row_tiles = tl.cdiv(rows, BLOCK_M)
    num_tiles = row_tiles * tl.cdiv(columns, BLOCK_N)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # Consecutive programs share a tile of the weight, the larger operand.
        row = ((tile % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        column = ((tile // row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, depth, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = tl.load(
                x_ptr + row[:, None] * x_row_stride + k[None, :] * x_depth_stride,
                mask=(row[:, None] < rows) & (k[None, :] < depth),
                other=0.0,
            )
            weight = tl.load(
                weight_ptr + column[None, :] * weight_row_stride + k[:, None] * weight_depth_stride,
                mask=(column[None, :] < columns) & (k[:, None] < depth),
                other=0,
            )
            total = tl.dot(x, weight, total, input_precision=PRECISION)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0)
            total += bias.to(tl.float32)[None, :]
        tl.store(
            out_ptr + row[:, None] * columns + column[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=(row[:, None] < rows) & (column[None, :] < columns),
        )
