"""Triton attention to latents (MLA): all heads share the keys, whose leading dimensions are the
values.

A program computes a block of (query, head) pairs of one row, which share the keys, with an online
softmax over all keys. For decodes, it covers one split of the keys, and the last program to finish
merges the splits in order.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.base import AttentionMetadata
from kernels.attention.triton_config import MIN_DOT_ROWS, dot_precision, latent_blocks
from kernels.attention.triton_kernel import LOG2E
from kernels.attention.triton_schedule import TARGET_PROGRAMS
from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.tiles import cdiv, next_power_of_2

_MAX_SPLITS = 32
"""Maximum number of splits of a decode's keys."""
_MERGED = tl.constexpr(64)
"""Number of columns of values that are merged at a time."""


def attend_to_latents(
    q: torch.Tensor,
    cache: torch.Tensor,
    value_dim: int,
    metadata: AttentionMetadata,
    scale: float,
    arrived: torch.Tensor,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Launches causal attention for all rows of a step: [T, heads, value_dim].

    Args:
        q: [T, heads, D], contiguous: queries.
        cache: [num_pages, page_size, 1, D]: latents.
        value_dim: number of leading dimensions of D that are the values.
        metadata: the step's rows.
        scale: factor by which scores are multiplied.
        arrived: the backend's counters, from `count_arrivals`.
        value_scale: scale of values, as in AttentionStep.
    """
    assert q.is_contiguous(), "pairs of queries and heads must be contiguous"
    assert metadata.block_size == 1, "latents require causal attention"
    assert not metadata.window, "latents do not support sliding windows"
    num_tokens, num_heads, head_dim = q.shape
    out = q.new_empty(num_tokens, num_heads, value_dim)
    if not num_tokens:
        return out
    is_decode = metadata.query_start is None
    is_fp8 = cache.dtype != q.dtype
    blocks = latent_blocks(value_dim, q.dtype, is_decode=is_decode, is_fp8=is_fp8)
    longest = 1 if is_decode else max(metadata.query_lens_host)
    num_blocks = cdiv(longest * num_heads, blocks.rows)
    num_rows, num_splits = metadata.page_table.shape[0], 1
    partial, lse = out, out
    if is_decode:
        assert num_rows * num_blocks <= len(arrived), "each tile needs a separate counter"
        num_splits = count_splits(num_rows * num_blocks, metadata.max_seq_len, blocks.least_split)
        partial = out.new_empty(num_rows, num_heads, num_splits, value_dim, dtype=torch.float32)
        lse = partial.new_empty(partial.shape[:3])
    _latent_kernel[(num_blocks, num_rows, num_splits)](
        q, cache, out, partial, lse, arrived,
        metadata.page_table, metadata.seq_lens,
        metadata.seq_lens if metadata.query_start is None else metadata.query_start,
        metadata.page_table.stride(0), scale, value_scale,
        IS_DECODE=is_decode, SCALES_VALUES=is_fp8, NUM_HEADS=num_heads,
        PAGE_SIZE=metadata.page_size,
        VALUE_DIM=value_dim, ROTARY_DIM=head_dim - value_dim,
        BLOCK_V=next_power_of_2(max(16, value_dim)),
        BLOCK_R=next_power_of_2(max(16, head_dim - value_dim)),
        BLOCK_M=blocks.rows, BLOCK_N=blocks.keys, PRECISION=dot_precision(q.dtype),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return out


def count_arrivals(num_rows: int, num_heads: int, device: torch.device) -> torch.Tensor:
    """Counters that identify the last program of a decode's tile.

    They are zero between launches, since the last program resets its tile's counter. One static
    tensor thus serves all layers and steps of a stream, including captured ones.

    Args:
        num_rows: maximum number of rows of a decode.
        num_heads: maximum number of query heads.
        device: device of the counters.
    """
    size = num_rows * cdiv(num_heads, MIN_DOT_ROWS)
    return torch.zeros(size, dtype=torch.int32, device=device)


def count_splits(programs_per_split: int, most_visible: int, least_split: int) -> int:
    """Number of splits of the keys with which programs fill the device; each split has at least
    `least_split` keys."""
    wanted = -(-TARGET_PROGRAMS // programs_per_split)
    useful = -(-most_visible // least_split)
    return max(1, min(wanted, useful, _MAX_SPLITS))


@triton.jit
def _split_length(visible, num_splits, BLOCK_N: tl.constexpr):
    """Number of keys per split: equal shares, rounded up to whole tiles."""
    return tl.maximum(tl.cdiv(tl.cdiv(visible, num_splits), BLOCK_N), 1) * BLOCK_N


@triton.jit
def _pairs_of_row(row, query_start_ptr, IS_DECODE: tl.constexpr, NUM_HEADS: tl.constexpr):
    """Index of the row's first query among all queries, and its number of (query, head) pairs."""
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
    """Range of positions to which the program attends: a decode's split, or all positions up to its
    last query."""
    start = seq_len * 0
    if IS_DECODE:
        length = _split_length(seq_len, tl.num_programs(2), BLOCK_N)
        start = tl.program_id(2) * length
        stop = tl.minimum(start + length, seq_len)
    else:
        last = tl.minimum((tl.program_id(0) + 1) * BLOCK_M, num_pairs) - 1
        stop = seq_len + last // NUM_HEADS + 1 - num_pairs // NUM_HEADS
        # Blocks past the row's last pair have no keys.
        stop = tl.where(tl.program_id(0) * BLOCK_M < num_pairs, stop, 0)
    return start, stop


@triton.jit
def load_rows(row_ptrs, inside, column, WIDTH: tl.constexpr):
    """Loads [rows, columns], with zeros outside the rows and the width."""
    mask = inside[:, None] & (column < WIDTH)[None, :]
    return tl.load(row_ptrs[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def fold_block(scores, v, highest, weights, total, PRECISION: tl.constexpr):
    """Continues an online softmax, in powers of 2, with a tile's scores [M, N] and values [N,
    D]."""
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    shrink = tl.exp2(highest - new_highest)
    probability = tl.exp2(scores - new_highest[:, None])
    product = tl.dot(probability.to(v.dtype), v, input_precision=PRECISION)
    total = total * shrink[:, None] + product
    weights = weights * shrink + tl.sum(probability, axis=1)
    return new_highest, weights, total


@triton.jit
def _leave_part(
    partial_ptr, lse_ptr, out_ptr, counter, place, inside, filled, lse, result,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Stores a split's partial output and log-sum-exp; the last program of a tile merges all
    splits."""
    value = tl.arange(0, BLOCK_V)
    num_splits = tl.num_programs(2)
    part = place * num_splits + tl.program_id(2)
    tl.store(lse_ptr + part, lse, mask=inside)
    tl.store(
        partial_ptr + part[:, None] * VALUE_DIM + value[None, :], result,
        mask=inside[:, None] & (value < VALUE_DIM)[None, :],
    )  # fmt: skip
    # HAZARD(order): all threads' stores must precede the count, and the count must precede all
    # loads of other splits.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == filled - 1
    tl.debug_barrier()
    if is_last:
        tl.store(counter, 0)
        _merge(partial_ptr, lse_ptr, out_ptr, place, inside, num_splits, filled, VALUE_DIM, BLOCK_M)


@triton.jit
def store_rows(out_ptr, place, column, rows, kept, VALUE_DIM: tl.constexpr):
    """Stores rows [M, columns] at the indices [M] of their pairs, rounded to the output's dtype."""
    out_ptrs = out_ptr + place[:, None] * VALUE_DIM + column[None, :]
    tl.store(out_ptrs, rows.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit
def _merge(
    partial_ptr, lse_ptr, out_ptr, place, inside, num_splits, filled,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merges the splits of pairs [M] in order; a few columns at a time, so that it needs no more
    registers than the attention itself."""
    for start in range(0, VALUE_DIM, _MERGED):
        column = start + tl.arange(0, _MERGED)
        kept = inside[:, None] & (column < VALUE_DIM)[None, :]
        highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        weights = tl.zeros((BLOCK_M,), tl.float32)
        total = tl.zeros((BLOCK_M, _MERGED), tl.float32)
        for split in range(0, filled):
            part = place * num_splits + split
            lse = tl.load(lse_ptr + part, mask=inside, other=0.0)
            values = tl.load(
                partial_ptr + part[:, None] * VALUE_DIM + column[None, :], mask=kept, other=0.0
            )
            new_highest = tl.maximum(highest, lse)
            shrink, weight = tl.exp2(highest - new_highest), tl.exp2(lse - new_highest)
            total = total * shrink[:, None] + values * weight[:, None]
            weights = weights * shrink + weight
            highest = new_highest
        store_rows(out_ptr, place, column, total / weights[:, None], kept, VALUE_DIM)


@dependent_kernel(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["page_table_ptr", "seq_len_ptr", "query_start_ptr"],
)
def _latent_kernel(
    q_ptr, cache_ptr, out_ptr, partial_ptr, lse_ptr, arrived_ptr,
    page_table_ptr, seq_len_ptr, query_start_ptr, table_stride, scale, value_scale,
    IS_DECODE: tl.constexpr, SCALES_VALUES: tl.constexpr, NUM_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, VALUE_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    HEAD_DIM: tl.constexpr = VALUE_DIM + ROTARY_DIM
    row = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_len_ptr + row)
    first, num_pairs = _pairs_of_row(row, query_start_ptr, IS_DECODE, NUM_HEADS)
    start, stop = _keys_of_block(seq_len, num_pairs, IS_DECODE, NUM_HEADS, BLOCK_M, BLOCK_N)
    split, filled = tl.program_id(2), 1
    if IS_DECODE:
        length = _split_length(seq_len, tl.num_programs(2), BLOCK_N)
        filled = tl.maximum(tl.cdiv(seq_len, length), 1)
        if split >= filled:
            return
    # Pair i of a row is query i // heads with head i % heads; pairs are contiguous in memory.
    pair = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = pair < num_pairs
    own = seq_len - num_pairs // NUM_HEADS + pair // NUM_HEADS
    place = first * NUM_HEADS + pair

    value = tl.arange(0, BLOCK_V)
    rotary = tl.arange(0, BLOCK_R)
    q_ptrs = q_ptr + place * HEAD_DIM
    q = load_rows(q_ptrs, inside, value, VALUE_DIM)
    rotated_q = load_rows(q_ptrs + VALUE_DIM, inside, rotary, ROTARY_DIM)
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
        latents = load_rows(key_ptrs, exists, value, VALUE_DIM).to(q.dtype)
        rotated = load_rows(key_ptrs + VALUE_DIM, exists, rotary, ROTARY_DIM).to(q.dtype)
        scores = tl.dot(rotated_q, tl.trans(rotated), input_precision=PRECISION)
        scores += tl.dot(q, tl.trans(latents), input_precision=PRECISION)
        # No row of scores is fully masked: every pair attends to position 0, or to a whole split.
        seen = exists[None, :] & (position[None, :] <= own[:, None])
        scores = tl.where(seen, scores * (scale * LOG2E), float("-inf"))
        highest, weights, total = fold_block(scores, latents, highest, weights, total, PRECISION)

    safe = tl.where(weights > 0, weights, 1.0)
    result = total / safe[:, None]
    if SCALES_VALUES:
        result = result * value_scale
    kept = inside[:, None] & (value < VALUE_DIM)[None, :]
    if filled == 1:
        store_rows(out_ptr, place, value, result, kept, VALUE_DIM)
    else:
        counter = arrived_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        _leave_part(
            partial_ptr, lse_ptr, out_ptr, counter, place, inside, filled,
            highest + tl.log2(safe), result, VALUE_DIM, BLOCK_M, BLOCK_V,
        )  # fmt: skip
