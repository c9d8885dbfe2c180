"""Triton batch-invariant matrix product: fixed tiles, and no split-K: one program sums over K in
order."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.linear.base import HALF_BYTES, BlockScales
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
_QUANTIZED_TILES = {dtype: tiles._replace(columns=64) for dtype, tiles in _TILES.items()}
"""Tiles for quantized weights, whose dequantization needs registers; fewer columns do not affect
sums."""
_UNALIGNED_DEPTH = 32
"""Depth of a tile whose features do not share a scale, that of MXFP4's blocks; with twice as many,
registers spill."""
_INTERPRETER_PROGRAMS = 3


def matmul_fixed_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scaling: BlockScales | None = None,
) -> torch.Tensor:
    """Product of x [M, K] with the transposed weight [N, K], plus bias [N], summed in fp32: [M, N].

    With `scaling`, `weight` holds uint8 codes [N, K] or [N, K / 2], and dequantized values are
    rounded to the type of x.
    """
    tiles = (_TILES if scaling is None else _QUANTIZED_TILES).get(x.dtype)
    if tiles is None:
        raise ValueError(f"no batch-invariant matmul for {x.dtype}: use one of {list(_TILES)}")
    rows, depth = x.shape
    step = tiles.depth if scaling is None else quantized_depth(scaling, depth, tiles.depth)
    columns = weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    num_tiles = cdiv(rows, tiles.rows) * cdiv(columns, tiles.columns)
    _matmul_kernel[(min(num_tiles, _num_programs(x.device)),)](
        x, weight, bias if bias is not None else weight, out, rows, columns, depth,
        x.stride(0), x.stride(1), weight.stride(0), weight.stride(1),
        scaling.scales if scaling is not None else weight,
        scaling.scales.stride(0) if scaling is not None else 0,
        scaling.offset if scaling is not None else 0,
        weight if scaling is None or scaling.zeros is None else scaling.zeros,
        HAS_BIAS=bias is not None, SCALE_BLOCK=scaling.block if scaling is not None else 0,
        BY_TILE=scaling is not None and scales_by_tile(scaling, depth, step),
        CODE="" if scaling is None else scaling.code,
        PER_BYTE=2 if scaling is not None and scaling.code in HALF_BYTES else 1,
        HAS_ZEROS=scaling is not None and scaling.zeros is not None,
        BLOCK_M=tiles.rows, BLOCK_N=tiles.columns, BLOCK_K=step,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def quantized_depth(scaling: BlockScales, depth: int, step: int) -> int:
    """Depth of a tile: `step` features of `depth`, or fewer if these do not share a scale."""
    return step if scales_by_tile(scaling, depth, step) else min(step, _UNALIGNED_DEPTH)


def scales_by_tile(scaling: BlockScales, depth: int, step: int) -> bool:
    """Whether features [start, start + step) of a row share a scale, for all multiples `start` of
    `step`."""
    is_aligned = scaling.offset % step == 0 and scaling.block % step == 0
    return is_aligned or scaling.offset + depth <= scaling.block


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETER_PROGRAMS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@triton.jit
def e4m3_to_float(bits):
    """fp32 values of e4m3 bits, uint8 [...]: e4m3 is fp16 with a shorter mantissa and another bias.

    This works on GPUs without FP8, and in Triton's interpreter.
    """
    wide = bits.to(tl.int32)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.int16)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def decode_weights(bits, k, CODE: tl.constexpr):
    """fp32 values of codes, uint8 [...], of input features k, before zero points and scales."""
    if CODE == "e4m3":
        values = e4m3_to_float(bits)
    elif CODE == "int8":
        values = bits.to(tl.int8, bitcast=True).to(tl.float32)
    elif CODE == "uint8":
        values = bits.to(tl.float32)
    elif CODE == "uint8b128":
        values = bits.to(tl.float32) - 128.0
    else:
        code = (bits.to(tl.int32) >> ((k % 2) * 4)) & 15
        if CODE == "uint4":
            values = code.to(tl.float32)
        elif CODE == "uint4b8":
            values = code.to(tl.float32) - 8.0
        else:
            tl.static_assert(CODE == "e2m1")
            # As e4m3: fp16 with a shorter mantissa and exponent, and another bias.
            half = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.int16)
            values = half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    return values


@triton.jit
def scaled_weights(
    bits, k, start, depth, inside, scale_ptr, zero_ptr, row, offset,
    SCALE_BLOCK: tl.constexpr, BY_TILE: tl.constexpr, CODE: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """Dequantized weights, fp32 [BLOCK_K, BLOCK_N], of a tile of codes: input features k, from
    `start` on, and output features whose scales begin at offsets `row` [BLOCK_N]; `inside` masks
    those that exist."""
    values = decode_weights(bits, k[:, None], CODE)
    if BY_TILE:
        block, there = (row + (start + offset) // SCALE_BLOCK)[None, :], inside[None, :]
    else:
        block = row[None, :] + ((k + offset) // SCALE_BLOCK)[:, None]
        there = inside[None, :] & (k < depth)[:, None]
    if HAS_ZEROS:
        values -= tl.load(zero_ptr + block, mask=there, other=0).to(tl.float32)
    return values * tl.load(scale_ptr + block, mask=there, other=0.0)


# Not specialised on the number of rows: one binary serves all batches.
@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, columns, depth,
    x_row_stride, x_depth_stride, weight_row_stride, weight_depth_stride,
    scale_ptr, scale_stride, scale_offset, zero_ptr,
    HAS_BIAS: tl.constexpr, SCALE_BLOCK: tl.constexpr, CODE: tl.constexpr,
    BY_TILE: tl.constexpr, PER_BYTE: tl.constexpr, HAS_ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
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
                weight_ptr
                + column[None, :] * weight_row_stride
                + (k // PER_BYTE)[:, None] * weight_depth_stride,
                mask=(column[None, :] < columns) & (k[:, None] < depth),
                other=0,
            )
            if SCALE_BLOCK > 0:
                weight = scaled_weights(
                    weight, k, start, depth, column < columns, scale_ptr, zero_ptr,
                    column * scale_stride, scale_offset, SCALE_BLOCK, BY_TILE, CODE, HAS_ZEROS,
                ).to(x.dtype)  # fmt: skip
            total = tl.dot(x, weight, total, input_precision=PRECISION)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0)
            total += bias.to(tl.float32)[None, :]
        tl.store(
            out_ptr + row[:, None] * columns + column[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=(row[:, None] < rows) & (column[None, :] < columns),
        )
