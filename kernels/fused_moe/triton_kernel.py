"""Triton fused mixture of experts: (token, expert) pairs in tiles of one expert each.

There are four launches: the alignment to tiles, the two matmuls of an MLP, and the sum over each
token's experts and further terms. Biases, weights and the activation are applied in the epilogues
of the matmuls. FP8 experts with many tokens use FP8 inputs, which a separate launch before each
matmul quantizes.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention.triton_config import compute_capability, dot_precision
from kernels.choose_experts.base import ExpertChoice
from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.fused_moe import (
    SILU,
    Activation,
    ExpertBiases,
    Experts,
    ExpertWeights,
    ExtraTerms,
    fused_moe,
)
from kernels.fused_moe.triton_align import Tiles, align_pairs
from kernels.gate_and_mul.triton_kernel import activated
from kernels.linear.packed_codes import TILE_COLUMNS, TILE_DEPTH, PackedCodes
from kernels.linear.triton_packed import constants, packed_product, stages
from kernels.quantize_fp8 import quantize_fp8
from kernels.registry import implements
from kernels.tiles import cdiv

_SUM_BLOCK = 1024
"""Number of columns per program of the sum."""


class _Sizes(NamedTuple):
    """Tile sizes and launch parameters of a matmul."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_SMALLEST = _Sizes(16, 64, 128, 4, 3)
"""Sizes of the matmuls for few rows per expert, which are bound by loading the weights: deep tiles
and many programs."""
_SIZES = {16: _SMALLEST, 64: _Sizes(64, 128, 64, 4, 3), 128: _Sizes(128, 128, 64, 8, 3)}
"""Sizes of the matmuls, by rows per tile."""
_LARGE_STAGES = 3
"""Number of pipeline stages of matmuls with tiles of 128 rows and quantized weights; such tiles
take most of the shared memory."""
_HOPPER = 90
"""Minimum compute capability (9.0) at which tiles of 64 or more rows with quantized weights use all
pipeline stages. Below it, such tiles have one stage fewer, since several formats would spill 8 or
16 bytes."""
_SINGLE_SIZES = _Sizes(16, 64, 32, 4, 2)
"""Sizes of the matmuls in fp32."""
_FP8_SIZES = {64: _Sizes(64, 128, 128, 4, 3), 128: _Sizes(128, 128, 128, 8, 3)}
"""Sizes of matmuls with FP8 inputs, by rows per tile. For tiles of 16 rows, the weights are
dequantized instead of quantizing the inputs."""
_FP8_CAPABILITY = 89
"""Minimum compute capability for FP8 matmuls."""
_BLACKWELL, _BLACKWELL_WARPS = 100, 8
"""Minimum compute capability at which all of these tiles, and those that decode FP8 with scales per
group, have eight warps: with four, tiles of 64 rows spill 8 bytes, and tiles of 16 rows 24."""
_ADA_COLUMNS = 64
"""Columns of FP8 tiles before Hopper, where matmuls read both operands from registers."""


@implements(fused_moe, "triton")
def launch_fused_moe(
    x: torch.Tensor,
    experts: Experts,
    choice: ExpertChoice,
    *,
    biases: ExpertBiases | None = None,
    extra: ExtraTerms = ExtraTerms(),  # noqa: B008  # a tuple
    activation: Activation = SILU,
    first_expert: int = 0,
    weighs_inputs: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Launches alignment, matmuls and sum; does not wait for the device, since the number of tiles
    is an upper bound."""
    assert biases is None or not weighs_inputs, "biases are not weighted"
    num_tokens, num_choices = choice.expert_ids.shape
    if not num_tokens:
        return torch.empty_like(x)
    num_experts = len(experts.down.values)
    rows = 16 if batch_invariant else _tile_rows(num_tokens * num_choices, num_experts, x.dtype)
    tiles = align_pairs(choice.expert_ids, first_expert, num_experts, rows)
    num_pairs = choice.expert_ids.numel()
    first_bias, second_bias = (None, None) if biases is None else biases
    # Weights of inputs can multiply the outputs of the first matmul instead, which is linear.
    factors = (choice.weights, None) if weighs_inputs else (None, choice.weights)
    first = experts.gate_up, tiles, first_bias, factors[0], activation
    second = experts.down, tiles, second_bias, factors[1], None
    parts = _multiply(_multiply(x, *first, num_pairs, num_choices), *second, num_pairs, 1)
    out = torch.empty_like(x)
    size, shared, gate = x.shape[1], extra.shared, extra.gate
    _sum_kernel[(num_tokens, cdiv(size, _SUM_BLOCK))](
        parts, choice.expert_ids, out, size, first_expert,
        x if shared is None else shared, x.stride(0) if shared is None else shared.stride(0),
        choice.weights if gate is None else gate, 0 if gate is None else gate.stride(0),
        x, x.stride(0), choice.weights, extra.first_zero_expert or 0,
        HAS_SHARED=shared is not None, HAS_GATE=gate is not None,
        HAS_ZERO_EXPERTS=extra.first_zero_expert is not None,
        NUM_EXPERTS=num_experts, NUM_CHOICES=num_choices, BLOCK=_SUM_BLOCK,
    )  # fmt: skip
    return out


def _tile_rows(num_pairs: int, num_experts: int, dtype: torch.dtype) -> int:
    """Number of rows per tile: the smallest one that fits an expert's pairs if they are evenly
    distributed."""
    if dtype == torch.float32:
        return _SINGLE_SIZES.rows
    return next((rows for rows in _SIZES if num_pairs <= rows * num_experts), max(_SIZES))


def _multiply(
    x: torch.Tensor,
    weights: ExpertWeights,
    tiles: Tiles,
    bias: torch.Tensor | None,
    factors: torch.Tensor | None,
    activation: Activation | None,
    num_pairs: int,
    pairs_per_row: int,
) -> torch.Tensor:
    """Multiplies row `pair // pairs_per_row` of `x` by the transposed weight [N, K] of the pair's
    expert, adds the expert's bias, and multiplies by the pair's factor: [pairs, N]. Applies the
    activation, if there is one: [pairs, N / 2], or [pairs, N] without gates. Rows of other ranks'
    experts are not written."""
    values, packed = weights.values, weights.packed
    assert weights.scaling is None, "quantized weights are not packed"
    depth, num_tiles = x.shape[1], len(tiles.experts)
    size = values.shape[1] if packed is None else packed.shape[0]
    tile_rows = len(tiles.pairs) // num_tiles
    width = size if activation is None or not activation.is_gated else size // 2
    out = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    common: dict[str, Any] = {
        "HAS_BIAS": bias is not None,
        "HAS_FACTORS": factors is not None,
        "ACTIVATION": "" if activation is None else activation.kind,
        "ALPHA": 0.0 if activation is None else activation.alpha,
        "LIMIT": 0.0 if activation is None else activation.limit,
        "PAIRS_PER_ROW": pairs_per_row,
        "BLOCK_M": tile_rows,
    }
    tensors = (
        *(out, tiles.pairs, tiles.experts, x if bias is None else bias),
        *(x if factors is None else factors, num_pairs, size),
    )
    if packed is not None and _multiplies_fp8(packed, x.dtype, tile_rows):
        by_block, sizes = packed.group > 0, _fp8_sizes(tile_rows)
        rows, codes = quantize_fp8(x, by_block=by_block), values.view(torch.float8_e4m3fn)
        _fp8_multiply_kernel[(num_tiles * cdiv(size, sizes.columns),)](
            rows.codes, rows.scales, *tensors, len(rows.codes), codes, packed.scales,
            codes.stride(0), packed.scales.stride(0), cdiv(depth, TILE_DEPTH),
            **common, BY_BLOCK=by_block, TILE=TILE_COLUMNS, BLOCK_N=sizes.columns,
            BLOCK_K=TILE_DEPTH, num_warps=sizes.warps, num_stages=sizes.stages,
        )  # fmt: skip
        return out
    arguments = x, *tensors, depth, x.stride(0)
    if packed is not None:
        scales = packed.scales
        _packed_multiply_kernel[(num_tiles * cdiv(size, TILE_COLUMNS),)](
            *arguments, values, scales, scales if packed.zeros is None else packed.zeros,
            values.stride(0), scales.stride(0), cdiv(depth, TILE_DEPTH),
            **common, **constants(packed, x.dtype), num_warps=_packed_warps(tile_rows, packed),
            num_stages=_packed_stages(tile_rows, x.dtype),
        )  # fmt: skip
        return out
    sizes = _SINGLE_SIZES if x.dtype == torch.float32 else _SIZES[tile_rows]
    _multiply_kernel[(num_tiles * cdiv(size, sizes.columns),)](
        *arguments, values, values.stride(0), values.stride(1),
        **common, BLOCK_N=sizes.columns, BLOCK_K=sizes.depth,
        PRECISION=dot_precision(x.dtype), num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    return out


def _packed_warps(tile_rows: int, packed: PackedCodes) -> int:
    """Number of warps of matmuls with quantized weights on the current device."""
    is_fp8 = packed.code == "e4m3" and packed.group > 0 and compute_capability() >= _BLACKWELL
    return 8 if is_fp8 or tile_rows == max(_SIZES) else 4


def _packed_stages(tile_rows: int, dtype: torch.dtype) -> int:
    """Number of pipeline stages of matmuls with quantized weights on the current device."""
    number = _LARGE_STAGES if tile_rows == max(_SIZES) else stages(dtype)
    return number - (tile_rows > min(_SIZES) and compute_capability() < _HOPPER)


def _fp8_sizes(tile_rows: int) -> _Sizes:
    """Sizes of matmuls with FP8 inputs on the current device."""
    sizes, capability = _FP8_SIZES[tile_rows], compute_capability()
    if capability >= _BLACKWELL:
        return sizes._replace(warps=_BLACKWELL_WARPS)
    return sizes._replace(columns=_ADA_COLUMNS) if capability == _FP8_CAPABILITY else sizes


def _multiplies_fp8(packed: PackedCodes, dtype: torch.dtype, tile_rows: int) -> bool:
    """Whether the inputs of the matmuls are quantized to FP8, like the weights. This requires
    bfloat16 inputs, FP8 weights with a scale per output feature or per 128 input features, and
    tiles of more than 16 rows."""
    return (
        packed.code == "e4m3"
        and packed.group in (0, TILE_DEPTH)
        and dtype == torch.bfloat16
        and tile_rows in _FP8_SIZES
        and compute_capability() >= _FP8_CAPABILITY
    )


@triton.jit
def _find_tile(
    pairs_ptr, experts_ptr, size,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """This program's expert (-1 if unused), pairs [BLOCK_M], first column, and columns [BLOCK_N] of
    the weight."""
    # Consecutive programs share a tile's rows, and the tiles of an expert are consecutive.
    num_columns = tl.cdiv(size, BLOCK_N)
    tile = tl.program_id(0) // num_columns
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    pair = tl.load(pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    first = (tl.program_id(0) % num_columns) * BLOCK_N
    column = first + tl.arange(0, BLOCK_N)
    if (ACTIVATION != "") & (ACTIVATION != "relu2"):
        # A gate and its up are adjacent columns, so that they are in one tile.
        column = tl.where(column % 2 == 0, column // 2, column // 2 + size // 2)
    return expert, pair, first, column


@triton.jit
def _finish(
    total, out_ptr, bias_ptr, factors_ptr, expert, pair, exists, first, column, size,
    HAS_BIAS: tl.constexpr, HAS_FACTORS: tl.constexpr, ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Applies bias, factors and activation to sums [BLOCK_M, BLOCK_N], and stores them."""
    inside = first + tl.arange(0, BLOCK_N) < size
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * size + column, mask=inside, other=0.0)
        total += bias.to(tl.float32)[None, :]
    if HAS_FACTORS:
        total *= tl.load(factors_ptr + pair, mask=exists, other=0.0)[:, None]
    place = first + tl.arange(0, BLOCK_N)
    if ACTIVATION != "":
        total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
    if ACTIVATION == "relu2":
        total = tl.maximum(total, 0.0)
        total = total * total
    elif ACTIVATION != "":
        gate, up = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N // 2, 2)))
        total = activated(gate, up, ACTIVATION, ALPHA, LIMIT)
        size = size // 2
        place = first // 2 + tl.arange(0, BLOCK_N // 2)
    tl.store(
        out_ptr + pair[:, None] * size + place[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=exists[:, None] & (place < size)[None, :],
    )


# Not specialized on arguments that change with the number of tokens.
@dependent_kernel(do_not_specialize=["num_pairs"])
def _multiply_kernel(
    x_ptr, out_ptr, pairs_ptr, experts_ptr, bias_ptr, factors_ptr,
    num_pairs, size, depth, x_stride, weight_ptr, expert_stride, row_stride,
    HAS_BIAS: tl.constexpr, HAS_FACTORS: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    expert, pair, first, column = _find_tile(
        pairs_ptr, experts_ptr, size, ACTIVATION, BLOCK_M, BLOCK_N
    )
    if expert < 0:
        return
    exists = pair < num_pairs
    inside = first + tl.arange(0, BLOCK_N) < size
    x_row = x_ptr + (pair // PAIRS_PER_ROW)[:, None] * x_stride
    weight_row = weight_ptr + expert * expert_stride + column[None, :] * row_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        place = start + tl.arange(0, BLOCK_K)
        a = tl.load(
            x_row + place[None, :], mask=exists[:, None] & (place < depth)[None, :], other=0.0
        )
        b = tl.load(
            weight_row + place[:, None],
            mask=inside[None, :] & (place < depth)[:, None],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    _finish(
        total, out_ptr, bias_ptr, factors_ptr, expert, pair, exists, first, column, size,
        HAS_BIAS, HAS_FACTORS, ACTIVATION, ALPHA, LIMIT, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@dependent_kernel(do_not_specialize=["num_pairs"])
def _packed_multiply_kernel(
    x_ptr, out_ptr, pairs_ptr, experts_ptr, bias_ptr, factors_ptr,
    num_pairs, size, depth, x_stride,
    word_ptr, scale_ptr, zero_ptr, word_stride, scale_stride, num_steps,
    HAS_BIAS: tl.constexpr, HAS_FACTORS: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr, CODE: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, IS_WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    expert, pair, first, column = _find_tile(
        pairs_ptr, experts_ptr, size, ACTIVATION, BLOCK_M, BLOCK_N
    )
    if expert < 0:
        return
    exists = pair < num_pairs
    inside = first + tl.arange(0, BLOCK_N) < size
    total = packed_product(
        x_ptr + (pair // PAIRS_PER_ROW) * x_stride, exists, depth,
        word_ptr + expert * word_stride, scale_ptr + expert * scale_stride,
        zero_ptr + expert * scale_stride, tl.where(inside, column, 0), 0, num_steps, num_steps,
        CODE, OFFSET, GROUP, HAS_ZEROS, IS_WHOLE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    _finish(
        tl.trans(total), out_ptr, bias_ptr, factors_ptr, expert, pair, exists, first, column, size,
        HAS_BIAS, HAS_FACTORS, ACTIVATION, ALPHA, LIMIT, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@dependent_kernel(do_not_specialize=["num_pairs", "num_rows"])
def _fp8_multiply_kernel(
    x_ptr, x_scale_ptr, out_ptr, pairs_ptr, experts_ptr, bias_ptr, factors_ptr,
    num_pairs, size, num_rows,
    weight_ptr, scale_ptr, weight_stride, scale_stride, num_steps,
    HAS_BIAS: tl.constexpr, HAS_FACTORS: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr, BY_BLOCK: tl.constexpr, TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    expert, pair, first, column = _find_tile(
        pairs_ptr, experts_ptr, size, ACTIVATION, BLOCK_M, BLOCK_N
    )
    if expert < 0:
        return
    exists = pair < num_pairs
    column = tl.where(first + tl.arange(0, BLOCK_N) < size, column, 0)
    # Rows and columns past the last one read the first, so that nothing is masked.
    row, depth = tl.where(exists, pair // PAIRS_PER_ROW, 0), num_steps * BLOCK_K
    k = tl.arange(0, BLOCK_K)
    x_cell = x_ptr + row[:, None] * depth + k[None, :]
    weight_cell = weight_ptr + expert * weight_stride + column[None, :] * depth + k[:, None]
    x_scales = x_scale_ptr + row
    scales = scale_ptr + expert * scale_stride + column % TILE
    scales += column // TILE * TILE * (num_steps if BY_BLOCK else 1)
    x_scale, scale = tl.load(x_scales), tl.load(scales)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(num_steps):
        a, b = tl.load(x_cell + step * BLOCK_K), tl.load(weight_cell + step * BLOCK_K)
        if BY_BLOCK:
            # Scales of rows are loaded ahead. Loading those of columns ahead, or multiplying by
            # them first, would spill registers.
            following = tl.load(x_scales + tl.minimum(step + 1, num_steps - 1) * num_rows)
            scale = tl.load(scales + step * TILE)
            total += tl.dot(a, b) * x_scale[:, None] * scale[None, :]
            x_scale = following
        else:
            total = tl.dot(a, b, total)
    if not BY_BLOCK:
        total *= x_scale[:, None] * scale[None, :]
    _finish(
        total, out_ptr, bias_ptr, factors_ptr, expert, pair, exists, first, column, size,
        HAS_BIAS, HAS_FACTORS, ACTIVATION, ALPHA, LIMIT, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@dependent_kernel(do_not_specialize=["first_expert"])
def _sum_kernel(
    parts_ptr, ids_ptr, out_ptr, size, first_expert,
    shared_ptr, shared_stride, gate_ptr, gate_stride, x_ptr, x_stride, weights_ptr,
    first_zero_expert,
    HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, HAS_ZERO_EXPERTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, NUM_CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros((BLOCK,), tl.float32)
    zero_weight = 0.0
    for choice in range(NUM_CHOICES):
        pair = token * NUM_CHOICES + choice
        number = tl.load(ids_ptr + pair)
        expert = number - first_expert
        is_here = (expert >= 0) & (expert < NUM_EXPERTS)
        part = tl.load(parts_ptr + pair * size + column, mask=inside & is_here, other=0.0)
        total += part.to(tl.float32)
        if HAS_ZERO_EXPERTS:
            zero_weight += tl.load(weights_ptr + pair, mask=number >= first_zero_expert, other=0.0)
    if HAS_ZERO_EXPERTS:
        total += tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0) * zero_weight
    if HAS_SHARED:
        shared = tl.load(shared_ptr + token * shared_stride + column, mask=inside, other=0.0)
        shared = shared.to(tl.float32)
        if HAS_GATE:
            shared *= 1.0 / (1.0 + tl.exp(-tl.load(gate_ptr + token * gate_stride)))
        total += shared
    tl.store(out_ptr + token * size + column, total.to(out_ptr.dtype.element_ty), mask=inside)
