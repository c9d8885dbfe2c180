"""Triton matmuls with quantized weights in tiles (`packed_codes`).

A program multiplies tiles of weights, the first operand, by up to 64 rows. Matmuls of few rows are
split over input features (`triton_split`).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.triton_config import compute_capability
from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.linear.packed_codes import TILE_COLUMNS, TILE_DEPTH, PackedCodes
from kernels.linear.triton_split import new_parts, split_steps, store_sum
from kernels.tiles import cdiv

_ROWS = (16, 32, 64)
"""Numbers of rows per program. The smallest that holds a step's rows is used; in batch-invariant
mode, always the last one."""
_MOST_ROWS = 256
"""Number of rows above which a separate launch dequantizes the weights for a dense matmul:
otherwise, weights would be dequantized again for every 64 rows, and a dense matmul has larger
tiles. Estimated."""
_WARPS, _STAGES, _SINGLE_STAGES = 4, 4, 2
_ADA, _BLACKWELL = 89, 100
"""Compute capabilities for which one tile size of a format would spill registers; see
`_tile_rows` and `_count_warps`."""
_SPILLING_INT8 = {_ADA: 64, _BLACKWELL: 32}
"""Tile sizes of int8 weights with which four warps would spill 8 bytes, by compute capability."""
_MORE_WARPS = 8


def multiply_packed(
    x: torch.Tensor,
    weight: PackedCodes,
    bias: torch.Tensor | None,
    arrived: torch.Tensor,
    *,
    batch_invariant: bool,
) -> torch.Tensor:
    """Multiplies x [M, K] by the transposed weight [N, K] with fp32 accumulation, and adds bias
    [N]: [M, N].

    Equal inputs give bitwise equal results.

    Args:
        x: [M, K]: inputs.
        weight: the quantized weight.
        bias: [N]; None if unused.
        arrived: counters of the weight, from `count_arrivals`.
        batch_invariant: whether a row's result must not depend, bitwise, on the number of rows.
    """
    (rows, depth), (columns, _) = x.shape, weight.shape
    if rows > _MOST_ROWS and not batch_invariant:
        return torch.nn.functional.linear(x, unpack(weight, x.dtype), bias)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    size = _ROWS[-1] if batch_invariant else _tile_rows(rows, weight)
    tiles, num_steps = cdiv(rows, size) * cdiv(columns, TILE_COLUMNS), cdiv(depth, TILE_DEPTH)
    steps = num_steps if batch_invariant else split_steps(tiles, num_steps, x.device)
    splits = cdiv(num_steps, steps)
    partial = new_parts(tiles, splits, size * TILE_COLUMNS, arrived)
    _packed_matmul_kernel[(tiles, splits)](
        x, weight.words, weight.scales, weight.scales if weight.zeros is None else weight.zeros,
        out if bias is None else bias, out, partial, arrived,
        rows, columns, depth, x.stride(0), num_steps, steps,
        HAS_BIAS=bias is not None, **constants(weight, x.dtype), BLOCK_M=size,
        num_warps=_count_warps(size, weight), num_stages=stages(x.dtype),
    )  # fmt: skip
    return out


def _tile_rows(rows: int, weight: PackedCodes) -> int:
    """Number of rows per tile."""
    if weight.code == "e4m3" and weight.group and compute_capability() >= _BLACKWELL:
        rows = max(rows, _ROWS[1])  # smaller tiles spill 16 bytes
    return next((size for size in _ROWS if rows <= size), _ROWS[-1])


def _count_warps(tile_rows: int, weight: PackedCodes) -> int:
    """Number of warps per program."""
    generation = min(compute_capability(), _BLACKWELL)
    if weight.code == "int8" and tile_rows == _SPILLING_INT8.get(generation):
        return _MORE_WARPS
    return _WARPS


def unpack(weight: PackedCodes, dtype: torch.dtype) -> torch.Tensor:
    """The dequantized weight [N, K] in `dtype`."""
    columns, depth = weight.shape
    num_steps = cdiv(depth, TILE_DEPTH)
    out = torch.empty(columns, depth, dtype=dtype, device=weight.words.device)
    numbers = constants(weight, dtype)
    del numbers["IS_WHOLE"], numbers["PRECISION"]
    _unpack_kernel[(cdiv(columns, TILE_COLUMNS), num_steps)](
        weight.words, weight.scales, weight.scales if weight.zeros is None else weight.zeros,
        out, columns, depth, num_steps, **numbers,
    )  # fmt: skip
    return out


def constants(weight: PackedCodes, dtype: torch.dtype) -> dict[str, object]:
    """Compile-time arguments of `packed_product`."""
    return {
        "CODE": weight.code,
        "OFFSET": weight.offset,
        "GROUP": weight.group,
        "HAS_ZEROS": weight.zeros is not None,
        "IS_WHOLE": weight.shape[1] % TILE_DEPTH == 0,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "BLOCK_N": TILE_COLUMNS,
        "BLOCK_K": TILE_DEPTH,
    }


def stages(dtype: torch.dtype) -> int:
    """Number of pipeline stages: all tiles but one are prefetched."""
    return _SINGLE_STAGES if dtype == torch.float32 else _STAGES


@triton.jit
def _decode(words, CODE: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Decodes words [ROWS, DEPTH / codes per word] to TYPE [ROWS, DEPTH], exact in bf16; adds 128
    to 4-bit integers.

    4-bit and 7-bit integers become the lowest bits of a bf16 between 128 and 256. Floats become
    bf16 with a shorter mantissa and exponent, and another bias; bf16 also represents their
    subnormal numbers.
    """
    if CODE == "uint4":
        pairs = _join(
            _low_bits(words), _low_bits(words >> 4), _low_bits(words >> 8), _low_bits(words >> 12)
        )
        return _unpack(pairs, TYPE, ROWS, DEPTH)
    elif CODE == "e2m1":
        pairs = _join(
            ((words << 6) & 0x01C001C0) | ((words << 12) & -0x7FFF8000),
            ((words << 2) & 0x01C001C0) | ((words << 8) & -0x7FFF8000),
            ((words >> 2) & 0x01C001C0) | ((words << 4) & -0x7FFF8000),
            ((words >> 6) & 0x01C001C0) | (words & -0x7FFF8000),
        )
        return _unpack(pairs, TYPE, ROWS, DEPTH) * 8.507059173023462e37  # 2 ** 126
    elif CODE == "e4m3":
        upper = words << 8
        pairs = tl.join(
            ((upper >> 4) & 0x07F007F0) | (upper & -0x7FFF8000),
            ((words >> 4) & 0x07F007F0) | (words & -0x7FFF8000),
        )
        return _unpack(pairs, TYPE, ROWS, DEPTH) * 1.329227995784916e36  # 2 ** 120
    else:
        tl.static_assert(CODE == "int8")
        pairs = tl.join(words, words >> 8)
        # The sign bit turns 128 into 256.
        low = _unpack((pairs & 0x007F007F) | 0x43004300, TYPE, ROWS, DEPTH)
        return low - _unpack((pairs & 0x00800080) | 0x43004300, TYPE, ROWS, DEPTH)


@triton.jit
def _low_bits(words):
    return (words & 0x000F000F) | 0x43004300


@triton.jit
def _join(first, second, third, fourth):
    """Joins four tensors [...] to [..., 2, 2], in order."""
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def _unpack(pairs, TYPE: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Unpacks pairs of bf16 in 32 bits, the first in the low bits, to [ROWS, DEPTH]."""
    both = tl.reshape(tl.join(pairs & 0xFFFF, pairs >> 16), (ROWS, DEPTH))
    if tl.float32 == TYPE:
        return (both << 16).to(tl.float32, bitcast=True)  # bf16 is the upper half of fp32
    return both.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _weights(
    words, scale_ptr, zero_ptr, place, zero, step,
    CODE: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Weights of a tile, TYPE [BLOCK_N, BLOCK_K], multiplied by their scales if groups are smaller
    than a tile. `place` [BLOCK_N]: indices of the rows' first groups. `zero` [BLOCK_N]: offset of
    each row, used if groups are not smaller than a tile."""
    values = _decode(words, CODE, TYPE, BLOCK_N, BLOCK_K)
    if GROUP > 0 and GROUP < BLOCK_K:
        groups: tl.constexpr = BLOCK_K // GROUP
        cell = (place * groups)[:, None] + step * BLOCK_N * groups + tl.arange(0, groups)[None, :]
        values = tl.reshape(values, (BLOCK_N, groups, GROUP))
        if HAS_ZEROS:
            values -= tl.load(zero_ptr + cell).to(TYPE)[:, :, None]
        elif OFFSET != 0.0:
            values -= OFFSET
        values *= tl.load(scale_ptr + cell)[:, :, None]
        values = tl.reshape(values, (BLOCK_N, BLOCK_K))
    elif HAS_ZEROS:
        values -= zero.to(TYPE)[:, None]
    elif OFFSET != 0.0:
        values -= OFFSET
    return values


@triton.jit
def _group(step, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Index of the group that contains a tile, if groups are not smaller than tiles."""
    return step // (GROUP // BLOCK_K) if GROUP > 0 else step * 0


@triton.jit
def _row_words(CODE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Number of words per row of a tile."""
    return BLOCK_K // (8 if CODE == "uint4" or CODE == "e2m1" else 4)


@triton.jit
def _step_words(CODE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Number of words from a tile to the next one along input features."""
    return _row_words(CODE, BLOCK_K) * (1 if CODE == "e4m3" else BLOCK_N)


@triton.jit
def _places(
    column, num_steps, CODE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Indices of the first tile's words [BLOCK_N, words per row] and of first groups [BLOCK_N]."""
    size: tl.constexpr = _row_words(CODE, BLOCK_K)
    tile, row = column // BLOCK_N, column % BLOCK_N
    first = column * num_steps if CODE == "e4m3" else tile * num_steps * BLOCK_N + row
    word = (first * size)[:, None] + tl.arange(0, size)[None, :]
    # A group along input features covers at most a tile, several tiles, or all of them.
    num_groups = num_steps
    if GROUP >= BLOCK_K:
        num_groups = tl.cdiv(num_steps, GROUP // BLOCK_K)
    elif GROUP == 0:
        num_groups = 1
    return word, tile * num_groups * BLOCK_N + row


@triton.jit
def packed_product(
    x_row, exists, depth, word_ptr, scale_ptr, zero_ptr, column, first, last, num_steps,
    CODE: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    IS_WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum over the tiles [first, last) of `num_steps` along input features: fp32 [BLOCK_N,
    BLOCK_M].

    Args:
        x_row: pointers [BLOCK_M] to the rows' first features, which are adjacent.
        exists: [BLOCK_M]: whether the row exists.
        depth: number of input features.
        word_ptr: the weight's words; scale_ptr and zero_ptr are its scales and zeros.
        column: [BLOCK_N]: output features.
    """
    dtype: tl.constexpr = x_row.dtype.element_ty
    type: tl.constexpr = tl.float32 if dtype == tl.float32 else tl.bfloat16
    by_sum: tl.constexpr = GROUP >= BLOCK_K
    word, place = _places(column, num_steps, CODE, GROUP, BLOCK_N, BLOCK_K)
    word += word_ptr
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # Scales and offsets of the next tile are prefetched explicitly: Triton only pipelines whole
    # operands.
    scale, zero = place, place  # unused if groups are smaller than tiles
    if by_sum or GROUP == 0:
        cell = place + _group(first, GROUP, BLOCK_K) * BLOCK_N
        scale = tl.load(scale_ptr + cell)
        if HAS_ZEROS:
            zero = tl.load(zero_ptr + cell)
    for step in range(first, last):
        words = tl.load(word + step * _step_words(CODE, BLOCK_N, BLOCK_K))
        there = exists[None, :]
        if not IS_WHOLE:
            there = there & (k < depth - step * BLOCK_K)[:, None]
        x = tl.load(x_row[None, :] + step * BLOCK_K + k[:, None], mask=there, other=0.0)
        weights = _weights(
            words, scale_ptr, zero_ptr, place, zero, step, CODE, OFFSET, GROUP, HAS_ZEROS, BLOCK_N,
            BLOCK_K, type,
        ).to(dtype)  # fmt: skip
        if by_sum:
            cell = place + _group(tl.minimum(step + 1, num_steps - 1), GROUP, BLOCK_K) * BLOCK_N
            following = tl.load(scale_ptr + cell)
            if HAS_ZEROS:
                zero = tl.load(zero_ptr + cell)
            total += tl.dot(weights, x, input_precision=PRECISION) * scale[:, None]
            scale = following
        else:
            total = tl.dot(weights, x, total, input_precision=PRECISION)
    if GROUP == 0:
        total *= scale[:, None]
    return total


# Not specialized on the number of rows or on what follows from it.
@dependent_kernel(do_not_specialize=["rows", "steps"])
def _packed_matmul_kernel(
    x_ptr, word_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    rows, columns, depth, x_stride, num_steps, steps,
    HAS_BIAS: tl.constexpr, CODE: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, IS_WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    tile, first = tl.program_id(0), tl.program_id(1) * steps
    row_tiles = tl.cdiv(rows, BLOCK_M)  # consecutive programs share a tile of the weight
    row = (tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tile // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    total = packed_product(
        x_ptr + row * x_stride, row < rows, depth, word_ptr, scale_ptr, zero_ptr, column,
        first, tl.minimum(first + steps, num_steps), num_steps,
        CODE, OFFSET, GROUP, HAS_ZEROS, IS_WHOLE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    store_sum(
        total, tile, row, column, rows, columns, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
        HAS_BIAS, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@dependent_kernel
def _unpack_kernel(
    word_ptr, scale_ptr, zero_ptr, out_ptr, columns, depth, num_steps,
    CODE: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    step = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    type: tl.constexpr = tl.float32 if dtype == tl.float32 else tl.bfloat16
    word, place = _places(column, num_steps, CODE, GROUP, BLOCK_N, BLOCK_K)
    words = tl.load(word_ptr + word + step * _step_words(CODE, BLOCK_N, BLOCK_K))
    scale, zero = place, place  # unused if groups are smaller than tiles
    if GROUP >= BLOCK_K or GROUP == 0:
        cell = place + _group(step, GROUP, BLOCK_K) * BLOCK_N
        scale = tl.load(scale_ptr + cell)
        if HAS_ZEROS:
            zero = tl.load(zero_ptr + cell)
    weights = _weights(
        words, scale_ptr, zero_ptr, place, zero, step, CODE, OFFSET, GROUP, HAS_ZEROS, BLOCK_N,
        BLOCK_K, type,
    )  # fmt: skip
    if GROUP >= BLOCK_K or GROUP == 0:
        weights = weights.to(tl.float32) * scale[:, None]
    k = step * BLOCK_K + tl.arange(0, BLOCK_K)
    tl.store(
        out_ptr + column.to(tl.int64)[:, None] * depth + k[None, :],
        weights.to(dtype),
        mask=(column < columns)[:, None] & (k < depth)[None, :],
    )
