"""Triton fused mixture of experts: (token, expert) pairs in tiles of one expert each.

Four launches: the alignment to tiles, both products, and the sum over each token's experts and
further terms. Biases, weights and the activation are applied in the epilogues of the products.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention.triton_config import dot_precision
from kernels.choose_experts.base import ExpertChoice
from kernels.fused_moe.base import Activation, ExpertBiases, Experts, ExpertWeights, ExtraTerms
from kernels.fused_moe.triton_align import Tiles, align_pairs
from kernels.gate_and_mul.triton_kernel import activated
from kernels.linear.base import HALF_BYTES, BlockScales
from kernels.linear.triton_kernel import quantized_depth, scaled_weights, scales_by_tile
from kernels.tiles import cdiv

_SUM_BLOCK = 1024
"""Number of columns per program of the sum."""


class _Sizes(NamedTuple):
    """Tile sizes and launch parameters of a product."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_SMALLEST = _Sizes(16, 64, 128, 4, 3)
"""Sizes for few rows per expert, which are bound by loading weights: deep tiles and many
programs."""
_SIZES = {16: _SMALLEST, 64: _Sizes(64, 128, 64, 4, 3), 128: _Sizes(128, 128, 64, 8, 3)}
"""Sizes by rows of a tile."""
_QUANTIZED_SIZES = {
    16: _Sizes(16, 64, 64, 4, 3),
    64: _Sizes(64, 64, 64, 4, 3),
    128: _Sizes(128, 64, 64, 8, 3),
}
"""Sizes for quantized weights, whose dequantization needs registers, by rows of a tile."""
_SINGLE_SIZES = _Sizes(16, 64, 32, 4, 2)
"""Sizes for fp32."""


def fused_moe(
    x: torch.Tensor,
    experts: Experts,
    choice: ExpertChoice,
    biases: ExpertBiases | None,
    extra: ExtraTerms,
    activation: Activation,
    first_expert: int,
    weighs_inputs: bool,
    batch_invariant: bool,
) -> torch.Tensor:
    """Launches alignment, products and sum; does not wait for the device, since the number of tiles
    is an upper bound."""
    num_tokens, num_choices = choice.expert_ids.shape
    if not num_tokens:
        return torch.empty_like(x)
    num_experts = len(experts.down.values)
    rows = 16 if batch_invariant else _tile_rows(num_tokens * num_choices, num_experts, x.dtype)
    tiles = align_pairs(choice.expert_ids, first_expert, num_experts, rows)
    num_pairs = choice.expert_ids.numel()
    first_bias, second_bias = (None, None) if biases is None else biases
    # Weights of inputs may as well multiply the first product, which is linear.
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
    """Number of rows per tile: the smallest that holds an expert's pairs if they are evenly
    distributed."""
    if dtype == torch.float32:
        return _SINGLE_SIZES.rows
    return next((rows for rows in _SIZES if num_pairs <= rows * num_experts), max(_SIZES))


def _sizes(rows: int, dtype: torch.dtype, scaling: BlockScales | None) -> _Sizes:
    if dtype == torch.float32:
        return _SINGLE_SIZES
    return (_SIZES if scaling is None else _QUANTIZED_SIZES)[rows]


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
    """Products [pairs, N] of row pair // pairs_per_row of `x` with its expert's weight [N, K]
    transposed, plus the expert's bias, times the pair's factor; with an activation, its results
    [pairs, N / 2]. Rows of other ranks' experts are not written."""
    values, scaling = weights
    (_, size, _), depth = values.shape, x.shape[1]
    num_tiles = len(tiles.experts)
    rows, columns, step, warps, stages = _sizes(len(tiles.pairs) // num_tiles, x.dtype, scaling)
    if scaling is not None:
        step = quantized_depth(scaling, depth, step)
    width = size if activation is None else size // 2
    kind, alpha, limit = ("", 0.0, 0.0) if activation is None else activation
    out = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    _multiply_kernel[(num_tiles * cdiv(size, columns),)](
        x, values, out, tiles.pairs, tiles.experts, x if bias is None else bias,
        x if factors is None else factors, num_pairs, size, depth,
        x.stride(0), values.stride(0), values.stride(1),
        values if scaling is None else scaling.scales,
        0 if scaling is None else scaling.scales.stride(0),
        0 if scaling is None else scaling.scales.stride(1),
        0 if scaling is None else scaling.offset,
        values if scaling is None or scaling.zeros is None else scaling.zeros,
        HAS_BIAS=bias is not None, HAS_FACTORS=factors is not None,
        SCALE_BLOCK=0 if scaling is None else scaling.block,
        BY_TILE=scaling is not None and scales_by_tile(scaling, depth, step),
        CODE="" if scaling is None else scaling.code,
        PER_BYTE=2 if scaling is not None and scaling.code in HALF_BYTES else 1,
        HAS_ZEROS=scaling is not None and scaling.zeros is not None,
        ACTIVATION=kind, ALPHA=alpha, LIMIT=limit,
        PAIRS_PER_ROW=pairs_per_row, BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=step,
        PRECISION=dot_precision(x.dtype), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


# Not specialised on arguments that change with the number of tokens.
@triton.jit(do_not_specialize=["num_pairs"])
def _multiply_kernel(
    x_ptr, weight_ptr, out_ptr, pairs_ptr, experts_ptr, bias_ptr, factors_ptr,
    num_pairs, size, depth, x_stride, expert_stride, row_stride,
    scale_ptr, scale_expert_stride, scale_row_stride, scale_offset, zero_ptr,
    HAS_BIAS: tl.constexpr, HAS_FACTORS: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, BY_TILE: tl.constexpr, CODE: tl.constexpr, PER_BYTE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Consecutive programs share a tile's rows, and tiles of an expert are consecutive.
    num_columns = tl.cdiv(size, BLOCK_N)
    tile = tl.program_id(0) // num_columns
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    exists = pair < num_pairs
    first = (tl.program_id(0) % num_columns) * BLOCK_N
    column = first + tl.arange(0, BLOCK_N)
    inside = column < size
    if ACTIVATION != "":
        # A gate and its up are adjacent columns, so that one thread has both.
        column = tl.where(column % 2 == 0, column // 2, column // 2 + size // 2)
    x_row = x_ptr + (pair // PAIRS_PER_ROW)[:, None] * x_stride
    weight_row = weight_ptr + expert * expert_stride + column[None, :] * row_stride
    scale_row = expert * scale_expert_stride + column * scale_row_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        place = start + tl.arange(0, BLOCK_K)
        a = tl.load(
            x_row + place[None, :], mask=exists[:, None] & (place < depth)[None, :], other=0.0
        )
        b = tl.load(
            weight_row + (place // PER_BYTE)[:, None],
            mask=inside[None, :] & (place < depth)[:, None],
            other=0,
        )
        if SCALE_BLOCK > 0:
            b = scaled_weights(
                b, place, start, depth, inside, scale_ptr, zero_ptr, scale_row, scale_offset,
                SCALE_BLOCK, BY_TILE, CODE, HAS_ZEROS,
            ).to(a.dtype)  # fmt: skip
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * size + column, mask=inside, other=0.0)
        total += bias.to(tl.float32)[None, :]
    if HAS_FACTORS:
        total *= tl.load(factors_ptr + pair, mask=exists, other=0.0)[:, None]
    if ACTIVATION != "":
        total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N // 2, 2)))
        total = activated(gate, up, ACTIVATION, ALPHA, LIMIT)
        size = size // 2
        column = first // 2 + tl.arange(0, BLOCK_N // 2)
        inside = column < size
    tl.store(
        out_ptr + pair[:, None] * size + column[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=exists[:, None] & inside[None, :],
    )


@triton.jit(do_not_specialize=["first_expert"])
def _sum_kernel(
    parts_ptr, ids_ptr, out_ptr, size, first_expert,
    shared_ptr, shared_stride, gate_ptr, gate_stride, x_ptr, x_stride, weights_ptr,
    first_zero_expert,
    HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, HAS_ZERO_EXPERTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, NUM_CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
