"""Triton block-sparse attention: scores of all blocks, and attention over selected blocks.

A program that computes scores loads a block of keys once for several queries of a row. A program
that computes attention has the query heads of one KV head of one query, and one split of the
query's tokens.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import math
from typing import Final

import torch
import triton.language as tl

from kernels.attention.triton_config import dot_precision
from kernels.attention.triton_kernel import LOG2E
from kernels.attention.triton_latent import count_splits, fold_block, load_rows, store_rows
from kernels.block_sparse_attention import (
    BlockSelection,
    attend_to_blocks,
    best_runs,
    select_blocks,
    selection_of,
)
from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.qk_norm_rope_store.reference import rotate_heads
from kernels.registry import implements
from kernels.sparse_attention import SparseQueries
from kernels.tiles import cdiv, next_power_of_2

_SCORED_QUERIES: Final = 32
"""Maximum number of queries per program that computes scores."""
_KEYS: Final = 64
"""Number of keys per tile of the attention."""
_LEAST_SPLIT: Final = 256
"""Minimum number of tokens per split (estimated, not measured)."""


@implements(select_blocks, "triton")
def launch_select_blocks(
    q: torch.Tensor,
    cache: torch.Tensor,
    queries: SparseQueries,
    block_size: int,
    *,
    cos_sin_cache: torch.Tensor,
    batch_invariant: bool = False,
) -> BlockSelection:
    """Launches a grid of (blocks, tiles of queries) that computes the scores of each chunk; torch
    selects the highest scores. A query's scores do not depend on other queries."""
    rotate_heads(q, queries.positions, cos_sin_cache)
    q = q.contiguous()
    num_heads, dim = q.shape[1:]
    parts = []
    for piece in queries.pieces:
        part = slice(piece.start, piece.stop)
        num_queries, num_rows = piece.stop - piece.start, len(piece.pages)
        num_blocks, count = cdiv(piece.length, block_size), num_queries // num_rows
        tiles = cdiv(count, _SCORED_QUERIES)
        scores = torch.empty(num_queries, num_heads, num_blocks, device=q.device)
        _block_score_kernel[(num_blocks, num_rows * tiles)](
            q[part], cache, piece.pages, queries.positions[part], scores,
            piece.length, count, tiles, piece.pages.stride(0), num_blocks,
            NUM_HEADS=num_heads, DIM=dim, PAGE_SIZE=queries.page_size, SIZE=block_size,
            BLOCK_N=next_power_of_2(max(16, block_size)), BLOCK_Q=_SCORED_QUERIES,
            BLOCK_H=next_power_of_2(max(16, num_heads)), BLOCK_D=next_power_of_2(max(16, dim)),
            PRECISION=dot_precision(q.dtype),
        )  # fmt: skip
        parts.append(best_runs(scores, piece, queries, block_size))
    return selection_of(parts, queries, block_size)


@implements(attend_to_blocks, "triton")
def launch_attend_to_blocks(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    selection: BlockSelection,
    *,
    scale: float,
    value_scale: float = 1.0,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Launches a grid of (KV heads, queries, splits); torch merges the splits. Batch-invariant
    steps have one split."""
    q = q.contiguous()
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_runs = selection.runs.shape[1:]
    most = num_runs * selection.length
    num_splits = 1
    if not batch_invariant:
        num_splits = count_splits(num_queries * num_kv_heads, most, _LEAST_SPLIT)
    is_split = num_splits > 1
    out = q.new_empty(
        *(num_queries, num_splits, num_heads, head_dim),
        dtype=torch.float32 if is_split else q.dtype,
    )
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=q.device)
    group = num_heads // num_kv_heads
    _blocks_kernel[(num_kv_heads, num_queries, num_splits)](
        q, *caches, selection.runs, selection.hidden, out, lse, scale, value_scale,
        KV_HEADS=num_kv_heads, GROUP=group, RUNS=num_runs, LENGTH=selection.length,
        BLOCK_R=next_power_of_2(num_runs), HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(max(16, head_dim)), BLOCK_M=next_power_of_2(max(16, group)),
        BLOCK_N=_KEYS, PRECISION=dot_precision(q.dtype), num_warps=4, num_stages=2,
    )  # fmt: skip
    if not is_split:
        return out.squeeze(1)
    shares = (lse * math.log(2.0)).softmax(1)
    return (out * shares.unsqueeze(-1)).sum(1).to(q.dtype)


@dependent_kernel(
    do_not_specialize=["length", "count", "tiles", "table_stride", "num_blocks"],
    do_not_specialize_on_alignment=["q_ptr", "position_ptr"],
)
def _block_score_kernel(
    q_ptr, cache_ptr, page_ptr, position_ptr, score_ptr,
    length, count, tiles, table_stride, num_blocks,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    block = tl.program_id(0)
    row = tl.program_id(1) // tiles
    start = tl.program_id(1) % tiles * BLOCK_Q
    offset = tl.arange(0, BLOCK_N)
    place = block * SIZE + offset
    exists = (offset < SIZE) & (place < length)
    page = tl.load(page_ptr + row * table_stride + place // PAGE_SIZE, mask=exists, other=0)
    column = tl.arange(0, BLOCK_D)
    keys = load_rows(cache_ptr + (page * PAGE_SIZE + place % PAGE_SIZE) * DIM, exists, column, DIM)
    head = tl.arange(0, BLOCK_H)
    for index in range(start, tl.minimum(start + BLOCK_Q, count)):
        query = (row * count + index).to(tl.int64)
        heads = load_rows(q_ptr + (query * NUM_HEADS + head) * DIM, head < NUM_HEADS, column, DIM)
        products = tl.dot(keys, tl.trans(heads), input_precision=PRECISION)
        seen = exists & (place <= tl.load(position_ptr + query))
        best = tl.max(tl.where(seen[:, None], products, float("-inf")), axis=0)
        target = score_ptr + (query * NUM_HEADS + head) * num_blocks + block
        tl.store(target, best, mask=head < NUM_HEADS)


@dependent_kernel(do_not_specialize_on_alignment=["hidden_ptr"])
def _blocks_kernel(
    q_ptr, key_ptr, value_ptr, run_ptr, hidden_ptr, out_ptr, lse_ptr, scale, value_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, RUNS: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK_R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    kv_head, query = tl.program_id(0), tl.program_id(1).to(tl.int64)
    own_ptr = run_ptr + (query * KV_HEADS + kv_head) * RUNS
    # The query's runs precede its entries of -1; the last tokens are those after the query.
    entry = tl.arange(0, BLOCK_R)
    entries = tl.load(own_ptr + entry, mask=entry < RUNS, other=-1)
    filled = tl.sum((entries >= 0).to(tl.int32), axis=0) * LENGTH
    filled -= tl.load(hidden_ptr + query).to(tl.int32)
    share = tl.cdiv(tl.cdiv(RUNS * LENGTH, tl.num_programs(2)), BLOCK_N) * BLOCK_N
    start = tl.program_id(2) * share
    stop = tl.minimum(start + share, filled)

    row = tl.arange(0, BLOCK_M)
    inside = row < GROUP
    column = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + row
    num_heads = KV_HEADS * GROUP
    q = load_rows(q_ptr + (query * num_heads + head) * HEAD_DIM, inside, column, HEAD_DIM)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weights = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for block in range(start, stop, BLOCK_N):
        place = block + tl.arange(0, BLOCK_N)
        exists = place < stop
        run = tl.load(own_ptr + place // LENGTH, mask=exists, other=0).to(tl.int64)
        cell = ((run + place % LENGTH) * KV_HEADS + kv_head) * HEAD_DIM
        keys = load_rows(key_ptr + cell, exists, column, HEAD_DIM).to(q.dtype)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
        scores = tl.where(exists[None, :], scores * (scale * LOG2E), float("-inf"))
        values = load_rows(value_ptr + cell, exists, column, HEAD_DIM).to(q.dtype)
        highest, weights, total = fold_block(scores, values, highest, weights, total, PRECISION)

    safe = tl.where(weights > 0, weights, 1.0)
    place = (query * tl.num_programs(2) + tl.program_id(2)) * num_heads + head
    kept = inside[:, None] & (column < HEAD_DIM)[None, :]
    store_rows(out_ptr, place, column, total / safe[:, None] * value_scale, kept, HEAD_DIM)
    tl.store(lse_ptr + place, highest + tl.log2(safe), mask=inside)
