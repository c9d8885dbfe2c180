"""Triton: pairs of token and expert sorted by expert, in tiles of rows of one expert each."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention.triton_config import dot_precision
from kernels.fused_moe.base import (
    Activation,
    ExpertBiases,
    ExpertChoice,
    Experts,
    ExpertWeights,
)
from kernels.linear.base import HALF_BYTES
from kernels.linear.triton_kernel import decode_weights

_ROWS, _COLUMNS, _DEPTH = 16, 64, 32


class _Tiles(NamedTuple):
    pairs: torch.Tensor
    """[tiles * rows] int64: token * K + choice, or T * K where a row is empty."""
    experts: torch.Tensor
    """[tiles] int64."""


def fused_moe(
    x: torch.Tensor,
    experts: Experts,
    choice: ExpertChoice,
    biases: ExpertBiases | None,
    activate: Activation,
) -> torch.Tensor:
    """The host never waits: the number of tiles is an upper bound."""
    num_tokens, num_choices = choice.expert_ids.shape
    if not num_tokens:
        return torch.empty_like(x)
    tiles = _sort(choice.expert_ids, len(experts.down.values))
    inner = _multiply(x, experts.gate_up, tiles, num_tokens * num_choices, num_choices)
    pairs = choice.expert_ids.reshape(-1)
    if biases is not None:
        inner += biases.gate_up.index_select(0, pairs)
    outer = _multiply(activate(inner), experts.down, tiles, num_tokens * num_choices, 1)
    if biases is not None:
        outer += biases.down.index_select(0, pairs)
    parts = outer.view(num_tokens, num_choices, -1).float() * choice.weights.unsqueeze(2)
    return parts.sum(dim=1).to(x.dtype)


def _sort(expert_ids: torch.Tensor, num_experts: int) -> _Tiles:
    flat = expert_ids.reshape(-1)
    num_pairs, device = flat.shape[0], flat.device
    experts, order = flat.sort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + _ROWS - 1) // _ROWS * _ROWS
    ends, padded_ends = counts.cumsum(0), padded.cumsum(0)
    shift = (padded_ends - padded) - (ends - counts)
    num_tiles = triton.cdiv(num_pairs, _ROWS) + min(num_experts, num_pairs)
    pairs = torch.full((num_tiles * _ROWS,), num_pairs, dtype=torch.int64, device=device)
    places = torch.arange(num_pairs, device=device) + shift.index_select(0, experts)
    pairs.index_copy_(0, places, order)
    starts = torch.arange(num_tiles, device=device) * _ROWS
    owner = torch.searchsorted(padded_ends, starts, right=True).clamp_(max=num_experts - 1)
    return _Tiles(pairs, owner)


def _multiply(
    x: torch.Tensor, weights: ExpertWeights, tiles: _Tiles, num_pairs: int, pairs_per_row: int
) -> torch.Tensor:
    """[pairs, N]: row pair // pairs_per_row of `x` times its expert's weight [N, K] transposed."""
    values, scaling = weights
    (_, size, _), depth = values.shape, x.shape[1]
    out = torch.empty(num_pairs, size, dtype=x.dtype, device=x.device)
    grid = (tiles.experts.shape[0], triton.cdiv(size, _COLUMNS))
    _multiply_kernel[grid](
        x, values, out, tiles.pairs, tiles.experts, num_pairs, size, depth,
        x.stride(0), values.stride(0), values.stride(1),
        values if scaling is None else scaling.scales,
        0 if scaling is None else scaling.scales.stride(0),
        0 if scaling is None else scaling.scales.stride(1),
        0 if scaling is None else scaling.offset,
        values if scaling is None or scaling.zeros is None else scaling.zeros,
        SCALE_BLOCK=0 if scaling is None else scaling.block,
        CODE="" if scaling is None else scaling.code,
        PER_BYTE=2 if scaling is not None and scaling.code in HALF_BYTES else 1,
        HAS_ZEROS=scaling is not None and scaling.zeros is not None,
        PAIRS_PER_ROW=pairs_per_row, ROWS=_ROWS, COLUMNS=_COLUMNS, DEPTH=_DEPTH,
        PRECISION=dot_precision(x.dtype),
    )  # fmt: skip
    return out


@triton.jit
def _multiply_kernel(
    x_ptr, weight_ptr, out_ptr, pairs_ptr, experts_ptr, num_pairs, size, depth,
    x_stride, expert_stride, row_stride,
    scale_ptr, scale_expert_stride, scale_row_stride, scale_offset, zero_ptr,
    SCALE_BLOCK: tl.constexpr, CODE: tl.constexpr, PER_BYTE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, PAIRS_PER_ROW: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    pair = tl.load(pairs_ptr + tile * ROWS + tl.arange(0, ROWS))
    exists = pair < num_pairs
    expert = tl.load(experts_ptr + tile)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    row = pair // PAIRS_PER_ROW
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        place = start + tl.arange(0, DEPTH)
        a = tl.load(
            x_ptr + row[:, None] * x_stride + place[None, :],
            mask=exists[:, None] & (place < depth)[None, :],
            other=0.0,
        )
        b = tl.load(
            weight_ptr
            + expert * expert_stride
            + column[None, :] * row_stride
            + (place // PER_BYTE)[:, None],
            mask=inside[None, :] & (place < depth)[:, None],
            other=0,
        )
        if SCALE_BLOCK > 0:
            block = (
                expert * scale_expert_stride
                + column[None, :] * scale_row_stride
                + ((place + scale_offset) // SCALE_BLOCK)[:, None]
            )
            there = inside[None, :] & (place < depth)[:, None]
            scale = tl.load(scale_ptr + block, mask=there, other=0.0)
            values = decode_weights(b, place[:, None], CODE)
            if HAS_ZEROS:
                values -= tl.load(zero_ptr + block, mask=there, other=0).to(tl.float32)
            b = (values * scale).to(a.dtype)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(
        out_ptr + pair[:, None] * size + column[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=exists[:, None] & inside[None, :],
    )
