"""Triton sparse attention: index keys, scores of all tokens, and attention over selected latents.

A program that computes scores loads a block of keys once for several queries of a row. A program
that computes attention has a block of heads of one query, and one split of the query's cells.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import math

import torch
import triton.language as tl

from kernels.attention.triton_config import dot_precision, latent_blocks
from kernels.attention.triton_kernel import LOG2E
from kernels.attention.triton_latent import count_splits, fold_block, load_rows, store_rows
from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.qk_norm_rope_store.reference import rotate_heads
from kernels.registry import implements
from kernels.sparse_attention import (
    SparseQueries,
    attend_to_cells,
    best_cells,
    select_tokens,
    store_index_keys,
)
from kernels.tiles import cdiv, next_power_of_2

_SCORED_KEYS = 64
"""Keys per program that computes scores."""
_SCORED_QUERIES = 32
"""Maximum number of queries per program that computes scores."""


@implements(store_index_keys, "triton")
def launch_store_index_keys(
    keys: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
) -> None:
    """Launches one program per token."""
    num_tokens, dim = keys.shape
    half = cos_sin_cache.shape[1] // 2
    if num_tokens:
        _store_kernel[(num_tokens,)](
            keys, cache, slot_mapping, positions, cos_sin_cache, keys.stride(0),
            DIM=dim, HALF=half, BLOCK=next_power_of_2(dim), BLOCK_HALF=next_power_of_2(half),
        )  # fmt: skip


@implements(select_tokens, "triton")
def launch_select_tokens(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    queries: SparseQueries,
    *,
    cos_sin_cache: torch.Tensor,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Launches a grid of (blocks of keys, tiles of queries) for the scores of each chunk; torch
    selects the highest scores."""
    assert not batch_invariant, "latents are not supported in batch-invariant mode"
    rotate_heads(q, queries.positions, cos_sin_cache)
    cells = torch.empty(len(q), queries.top_k, dtype=torch.int32, device=q.device)
    num_heads, dim = q.shape[1:]
    for piece in queries.pieces:
        part = slice(piece.start, piece.stop)
        num_queries, num_rows = piece.stop - piece.start, len(piece.pages)
        scores = weights.new_empty(num_queries, piece.length)
        count = num_queries // num_rows
        tiles = cdiv(count, _SCORED_QUERIES)
        _score_kernel[(cdiv(piece.length, _SCORED_KEYS), num_rows * tiles)](
            q[part], weights[part], cache, piece.pages, queries.positions[part], scores,
            piece.length, count, tiles, piece.pages.stride(0), weights.stride(0),
            NUM_HEADS=num_heads, DIM=dim, PAGE_SIZE=queries.page_size,
            BLOCK_N=_SCORED_KEYS, BLOCK_Q=_SCORED_QUERIES,
            BLOCK_H=next_power_of_2(max(16, num_heads)), BLOCK_D=next_power_of_2(max(16, dim)),
            PRECISION=dot_precision(q.dtype),
        )  # fmt: skip
        cells[part] = best_cells(scores, piece, queries)
    return cells


@implements(attend_to_cells, "triton")
def launch_attend_to_cells(
    q: torch.Tensor,
    cache: torch.Tensor,
    cells: torch.Tensor,
    value_dim: int,
    *,
    scale: float,
    value_scale: float = 1.0,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Launches a grid of (blocks of heads, queries, splits of cells); torch merges the splits."""
    assert not batch_invariant, "latents are not supported in batch-invariant mode"
    q = q.contiguous()
    num_queries, num_heads, head_dim = q.shape
    blocks = latent_blocks(value_dim, q.dtype, is_decode=True, is_fp8=cache.dtype != q.dtype)
    num_blocks = cdiv(num_heads, blocks.rows)
    num_splits = count_splits(num_queries * num_blocks, cells.shape[1], blocks.least_split)
    is_split = num_splits > 1
    out = q.new_empty(
        *(num_queries, num_splits, num_heads, value_dim),
        dtype=torch.float32 if is_split else q.dtype,
    )
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=q.device)
    _cells_kernel[(num_blocks, num_queries, num_splits)](
        q, cache, cells, out, lse, cells.stride(0), scale, value_scale,
        NUM_HEADS=num_heads, TOP_K=cells.shape[1], BLOCK_K=next_power_of_2(cells.shape[1]),
        VALUE_DIM=value_dim, ROTARY_DIM=head_dim - value_dim,
        BLOCK_V=next_power_of_2(max(16, value_dim)),
        BLOCK_R=next_power_of_2(max(16, head_dim - value_dim)),
        BLOCK_M=blocks.rows, BLOCK_N=blocks.keys, PRECISION=dot_precision(q.dtype),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    if not is_split:
        return out.squeeze(1)
    shares = (lse * math.log(2.0)).softmax(1)
    return (out * shares.unsqueeze(-1)).sum(1).to(q.dtype)


# Slots and positions are views of the step's staged inputs: one binary serves all alignments.
@dependent_kernel(do_not_specialize_on_alignment=["slot_ptr", "position_ptr"])
def _store_kernel(
    key_ptr, cache_ptr, slot_ptr, position_ptr, table_ptr, key_stride,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + token)
    key_ptrs = key_ptr + token * key_stride
    cell_ptrs = cache_ptr + tl.load(slot_ptr + token) * DIM
    # Rotated dimensions, and the others.
    half = tl.arange(0, BLOCK_HALF)
    inside = half < HALF
    table_ptrs = table_ptr + position * 2 * HALF + half
    cos = tl.load(table_ptrs, mask=inside, other=0.0)
    sin = tl.load(table_ptrs + HALF, mask=inside, other=0.0)
    first = tl.load(key_ptrs + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(key_ptrs + HALF + half, mask=inside, other=0.0).to(tl.float32)
    kind: tl.constexpr = cache_ptr.dtype.element_ty
    tl.store(cell_ptrs + half, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(cell_ptrs + HALF + half, (second * cos + first * sin).to(kind), mask=inside)
    plain = tl.arange(0, BLOCK)
    kept = (plain >= 2 * HALF) & (plain < DIM)
    tl.store(cell_ptrs + plain, tl.load(key_ptrs + plain, mask=kept, other=0.0), mask=kept)


@dependent_kernel(
    do_not_specialize=["length", "count", "tiles", "table_stride"],
    do_not_specialize_on_alignment=["q_ptr", "weight_ptr", "position_ptr"],
)
def _score_kernel(
    q_ptr, weight_ptr, cache_ptr, page_ptr, position_ptr, score_ptr,
    length, count, tiles, table_stride, weight_stride,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row = tl.program_id(1) // tiles
    start = tl.program_id(1) % tiles * BLOCK_Q
    place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = place < length
    page = tl.load(page_ptr + row * table_stride + place // PAGE_SIZE, mask=exists, other=0)
    column = tl.arange(0, BLOCK_D)
    key_ptrs = cache_ptr + (page * PAGE_SIZE + place % PAGE_SIZE) * DIM
    keys = load_rows(key_ptrs, exists, column, DIM)
    head = tl.arange(0, BLOCK_H)
    for index in range(start, tl.minimum(start + BLOCK_Q, count)):
        query = (row * count + index).to(tl.int64)
        head_ptrs = q_ptr + (query * NUM_HEADS + head) * DIM
        heads = load_rows(head_ptrs, head < NUM_HEADS, column, DIM)
        weight = tl.load(
            weight_ptr + query * weight_stride + head, mask=head < NUM_HEADS, other=0.0
        )
        products = tl.dot(keys, tl.trans(heads), input_precision=PRECISION)
        scores = tl.sum(tl.maximum(products, 0.0) * weight[None, :], axis=1)
        scores = tl.where(place <= tl.load(position_ptr + query), scores, float("-inf"))
        tl.store(score_ptr + query * length + place, scores, mask=exists)


@dependent_kernel
def _cells_kernel(
    q_ptr, cache_ptr, cell_ptr, out_ptr, lse_ptr, cell_stride, scale, value_scale,
    NUM_HEADS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
    VALUE_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    HEAD_DIM: tl.constexpr = VALUE_DIM + ROTARY_DIM
    query = tl.program_id(1).to(tl.int64)
    own_ptr = cell_ptr + query * cell_stride
    # The query's cells precede its entries of -1.
    entry = tl.arange(0, BLOCK_K)
    entries = tl.load(own_ptr + entry, mask=entry < TOP_K, other=-1)
    filled = tl.sum((entries >= 0).to(tl.int32), axis=0)
    share = tl.cdiv(tl.cdiv(TOP_K, tl.num_programs(2)), BLOCK_N) * BLOCK_N
    start = tl.program_id(2) * share
    stop = tl.minimum(start + share, filled)

    head = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = head < NUM_HEADS
    value = tl.arange(0, BLOCK_V)
    rotary = tl.arange(0, BLOCK_R)
    q_ptrs = q_ptr + (query * NUM_HEADS + head) * HEAD_DIM
    q = load_rows(q_ptrs, inside, value, VALUE_DIM)
    rotated_q = load_rows(q_ptrs + VALUE_DIM, inside, rotary, ROTARY_DIM)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weights = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for block in range(start, stop, BLOCK_N):
        place = block + tl.arange(0, BLOCK_N)
        exists = place < stop
        cell = tl.load(own_ptr + place, mask=exists, other=0).to(tl.int64)
        key_ptrs = cache_ptr + cell * HEAD_DIM
        latents = load_rows(key_ptrs, exists, value, VALUE_DIM).to(q.dtype)
        rotated = load_rows(key_ptrs + VALUE_DIM, exists, rotary, ROTARY_DIM).to(q.dtype)
        scores = tl.dot(rotated_q, tl.trans(rotated), input_precision=PRECISION)
        scores += tl.dot(q, tl.trans(latents), input_precision=PRECISION)
        scores = tl.where(exists[None, :], scores * (scale * LOG2E), float("-inf"))
        highest, weights, total = fold_block(scores, latents, highest, weights, total, PRECISION)

    safe = tl.where(weights > 0, weights, 1.0)
    place = (query * tl.num_programs(2) + tl.program_id(2)) * NUM_HEADS + head
    kept = inside[:, None] & (value < VALUE_DIM)[None, :]
    store_rows(out_ptr, place, value, total / safe[:, None] * value_scale, kept, VALUE_DIM)
    tl.store(lse_ptr + place, highest + tl.log2(safe), mask=inside)
