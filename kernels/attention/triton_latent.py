"""Triton attention to latents: keys that all heads share, whose leading dimensions are the values.

A program owns a block of (query, head) pairs of one row, which all read the same keys, and walks
these with an online softmax: all of them, or of a decode one of the splits that a second kernel
folds in their order.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.base import AttentionMetadata
from kernels.attention.triton_config import dot_precision, latent_blocks
from kernels.attention.triton_schedule import TARGET_PROGRAMS

_MAX_SPLITS = 32
"""Of a decode's keys."""


def attend_to_latents(
    q: torch.Tensor,
    cache: torch.Tensor,
    value_dim: int,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Launch for all rows of a step, of which all are causal: [T, heads, value_dim].

    Args:
        q: [T, heads, D], contiguous.
        cache: [num_pages, page_size, 1, D].
        value_dim: leading dimensions of D that are the values.
        metadata: of the rows.
        scale: factor of the products of queries and keys.
    """
    assert q.is_contiguous(), "pairs of queries and heads are counted through"
    assert metadata.block_size == 1, "latents are of causal rows"
    assert not metadata.window, "latents have no windows"
    num_tokens, num_heads, head_dim = q.shape
    out = q.new_empty(num_tokens, num_heads, value_dim)
    if not num_tokens:
        return out
    is_decode = metadata.query_start is None
    blocks = latent_blocks(value_dim, q.dtype, is_decode=is_decode)
    longest = 1 if is_decode else max(metadata.query_lens_host)
    num_blocks = triton.cdiv(longest * num_heads, blocks.rows)
    num_rows, num_splits = metadata.page_table.shape[0], 1
    target, lse = out, out
    if is_decode:
        num_splits = _count_splits(num_rows * num_blocks, metadata.max_seq_len, blocks.least_split)
        target = out.new_empty(num_rows, num_heads, num_splits, value_dim, dtype=torch.float32)
        lse = target.new_empty(target.shape[:3])
    _latent_kernel[(num_blocks, num_rows, num_splits)](
        q, cache, target, lse, metadata.page_table, metadata.seq_lens,
        metadata.seq_lens if metadata.query_start is None else metadata.query_start,
        metadata.page_table.stride(0), scale,
        IS_DECODE=is_decode, NUM_HEADS=num_heads, PAGE_SIZE=metadata.page_size,
        VALUE_DIM=value_dim, ROTARY_DIM=head_dim - value_dim,
        BLOCK_V=triton.next_power_of_2(max(16, value_dim)),
        BLOCK_R=triton.next_power_of_2(max(16, head_dim - value_dim)),
        BLOCK_M=blocks.rows, BLOCK_N=blocks.keys, PRECISION=dot_precision(q.dtype),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    if is_decode:
        _merge_kernel[(num_rows, num_heads)](
            target, lse, out, metadata.seq_lens, num_splits, BLOCK_N=blocks.keys,
            VALUE_DIM=value_dim, BLOCK_V=triton.next_power_of_2(max(16, value_dim)), num_warps=2,
        )  # fmt: skip
    return out


def _count_splits(programs_per_split: int, most_visible: int, least_split: int) -> int:
    """How many splits of the keys fill the device, where each is worth its while."""
    wanted = -(-TARGET_PROGRAMS // programs_per_split)
    useful = -(-most_visible // least_split)
    return max(1, min(wanted, useful, _MAX_SPLITS))


@triton.jit
def _split_length(visible, num_splits, BLOCK_N: tl.constexpr):
    """Keys of a split: an even share in whole blocks."""
    return tl.cdiv(tl.cdiv(visible, num_splits), BLOCK_N) * BLOCK_N


@triton.jit
def _pairs_of_row(row, query_start_ptr, IS_DECODE: tl.constexpr, NUM_HEADS: tl.constexpr):
    """The row's first query among all, and how many pairs its queries make."""
    first = row
    num_pairs = row.to(tl.int32) * 0 + NUM_HEADS
    if not IS_DECODE:
        first = tl.load(query_start_ptr + row).to(tl.int64)
        num_pairs = (tl.load(query_start_ptr + row + 1) - first).to(tl.int32) * NUM_HEADS
    return first, num_pairs


@triton.jit
def _keys_of_block(
    seq_len, num_pairs,
    IS_DECODE: tl.constexpr, NUM_HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The positions that the program walks: a decode's split, or all up to its last query's."""
    start = seq_len * 0
    if IS_DECODE:
        length = _split_length(seq_len, tl.num_programs(2), BLOCK_N)
        start = tl.program_id(2) * length
        stop = tl.minimum(start + length, seq_len)
    else:
        last = tl.minimum((tl.program_id(0) + 1) * BLOCK_M, num_pairs) - 1
        stop = seq_len + last // NUM_HEADS + 1 - num_pairs // NUM_HEADS
        # Blocks past the row's end have nothing to walk.
        stop = tl.where(tl.program_id(0) * BLOCK_M < num_pairs, stop, 0)
    return start, stop


@triton.jit
def _load_rows(row_ptrs, inside, column, WIDTH: tl.constexpr):
    """[rows, columns], zeros outside of rows and width."""
    mask = inside[:, None] & (column < WIDTH)[None, :]
    return tl.load(row_ptrs[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _fold_block(scores, v, highest, weights, total, PRECISION: tl.constexpr):
    """Online softmax: fold a block's scores [M, N] and values [N, D] into the running state."""
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    shrink = tl.exp(highest - new_highest)
    probability = tl.exp(scores - new_highest[:, None])
    product = tl.dot(probability.to(v.dtype), v, input_precision=PRECISION)
    total = total * shrink[:, None] + product
    weights = weights * shrink + tl.sum(probability, axis=1)
    return new_highest, weights, total


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["page_table_ptr", "seq_len_ptr", "query_start_ptr"],
)
def _latent_kernel(
    q_ptr, cache_ptr, out_ptr, lse_ptr, page_table_ptr, seq_len_ptr, query_start_ptr,
    table_stride, scale,
    IS_DECODE: tl.constexpr, NUM_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    HEAD_DIM: tl.constexpr = VALUE_DIM + ROTARY_DIM
    row = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_len_ptr + row)
    first, num_pairs = _pairs_of_row(row, query_start_ptr, IS_DECODE, NUM_HEADS)
    start, stop = _keys_of_block(seq_len, num_pairs, IS_DECODE, NUM_HEADS, BLOCK_M, BLOCK_N)
    # Pair i of a row is of its query i // heads and of head i % heads, and follows pair i - 1.
    pair = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = pair < num_pairs
    own = seq_len - num_pairs // NUM_HEADS + pair // NUM_HEADS
    place = first * NUM_HEADS + pair

    value = tl.arange(0, BLOCK_V)
    rotary = tl.arange(0, BLOCK_R)
    q_ptrs = q_ptr + place * HEAD_DIM
    q = _load_rows(q_ptrs, inside, value, VALUE_DIM)
    rotated_q = _load_rows(q_ptrs + VALUE_DIM, inside, rotary, ROTARY_DIM)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weights = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for block in range(start, stop, BLOCK_N):
        position = block + tl.arange(0, BLOCK_N)
        exists = position < stop
        page = tl.load(
            page_table_ptr + row * table_stride + position // PAGE_SIZE, mask=exists, other=0
        )
        key_ptrs = cache_ptr + (page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE) * HEAD_DIM
        latents = _load_rows(key_ptrs, exists, value, VALUE_DIM)
        rotated = _load_rows(key_ptrs + VALUE_DIM, exists, rotary, ROTARY_DIM)
        scores = tl.dot(rotated_q, tl.trans(rotated), input_precision=PRECISION)
        scores += tl.dot(q, tl.trans(latents), input_precision=PRECISION)
        # Every pair sees position 0, and of a decode's split all.
        seen = exists[None, :] & (position[None, :] <= own[:, None])
        scores = tl.where(seen, scores * scale, float("-inf"))
        highest, weights, total = _fold_block(scores, latents, highest, weights, total, PRECISION)

    # An empty split is never read by the second stage, and need not be finite.
    safe_weights = tl.where(weights > 0, weights, 1.0)
    if IS_DECODE:
        place = place * tl.num_programs(2) + tl.program_id(2)
        tl.store(lse_ptr + place, highest + tl.log(safe_weights), mask=inside)
    tl.store(
        out_ptr + place[:, None] * VALUE_DIM + value[None, :],
        (total / safe_weights[:, None]).to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & (value < VALUE_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["seq_len_ptr"])
def _merge_kernel(
    partial_ptr, lse_ptr, out_ptr, seq_len_ptr, num_splits,
    BLOCK_N: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Folds the splits of one head of one decode."""
    query = tl.program_id(0).to(tl.int64)
    place = query * tl.num_programs(1) + tl.program_id(1)
    column = tl.arange(0, BLOCK_V)
    inside = column < VALUE_DIM
    seq_len = tl.load(seq_len_ptr + query)
    filled = tl.cdiv(seq_len, tl.maximum(_split_length(seq_len, num_splits, BLOCK_N), 1))

    highest = float("-inf")
    weights = 0.0
    total = tl.zeros((BLOCK_V,), tl.float32)
    for split in range(0, filled):
        lse = tl.load(lse_ptr + place * num_splits + split)
        part_ptrs = partial_ptr + (place * num_splits + split) * VALUE_DIM + column
        part = tl.load(part_ptrs, mask=inside, other=0.0)
        new_highest = tl.maximum(highest, lse)
        shrink = tl.exp(highest - new_highest)
        weight = tl.exp(lse - new_highest)
        total = total * shrink + part * weight
        weights = weights * shrink + weight
        highest = new_highest
    result = total / tl.where(weights > 0, weights, 1.0)
    tl.store(out_ptr + place * VALUE_DIM + column, result.to(out_ptr.dtype.element_ty), mask=inside)
