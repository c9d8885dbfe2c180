"""Triton attention over a paged KV cache: decodes and extends, whose keys may be split.

A program computes one item of the schedule for one KV head: the queries of a tile, each with all
heads that share the KV head, and a range of keys, with an online softmax. Only tiles of keys at the
ends of the range are masked. If a tile's keys are split, each program stores a normalized partial
output with its log-sum-exp, and the program that arrives last merges them in order.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.triton_config import dot_precision
from kernels.attention.triton_schedule import _ITEM_WIDTH, Schedule
from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.tiles import next_power_of_2

_WIDTH = tl.constexpr(_ITEM_WIDTH)
_MERGED = tl.constexpr(8192)
"""Maximum number of elements of a tile's output that are merged at a time: 64 per thread of four
warps, in addition to as many of a partial output. More would spill registers."""
LOG2E = tl.constexpr(1.4426950408889634)
_HIDDEN = tl.constexpr(-(2.0**100))
"""Score of masked keys, whose weight is 0 relative to any other key. -inf would give NaN if a query
attends to no key of a tile; over all tiles, it attends to at least one.

HAZARD(fused arithmetic): the score is a power of 2, so that its product with any factor is exact.
If the product were rounded for the maximum, but not where it is fused with the subtraction of the
maximum, the difference could be arbitrarily large.
"""


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    schedule: Schedule,
    *,
    scale: float,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    value_scale: float = 1.0,
) -> None:
    """Launches attention of q [n, Hq, D] as scheduled, and writes it to `out` [n, Hq, Dv], which is
    contiguous; other arguments as in AttentionStep and AttentionSettings."""
    rows, blocks = schedule.rows, schedule.blocks
    _, num_q_heads, head_dim = q.shape
    page_size, num_kv_heads, value_dim = v_cache.shape[1:]
    group = num_q_heads // num_kv_heads
    own = schedule.queries * group
    partial = torch.empty(
        schedule.num_partials, num_kv_heads, own, value_dim, dtype=torch.float32, device=q.device
    )
    lse = partial.new_empty(schedule.num_partials, num_kv_heads, own)
    unused = rows.seq_lens
    _attention_kernel[(schedule.items.shape[0], num_kv_heads)](
        q, k_cache, v_cache, out, lse if sinks is None else sinks, partial, lse,
        schedule.items, schedule.arrived, rows.page_table, rows.seq_lens,
        unused if rows.query_start is None else rows.query_start,
        unused if rows.page_rows is None else rows.page_rows,
        q.stride(0), q.stride(1), rows.page_table.stride(0), scale, value_scale,
        RAGGED=rows.query_start is not None, INDIRECT=rows.page_rows is not None,
        HAS_SINKS=sinks is not None,
        SCALES_VALUES=k_cache.dtype != q.dtype or value_scale != 1.0, CAP=cap,
        WINDOW=rows.window, CHUNKED=rows.is_chunked, BIDIRECTIONAL=rows.is_bidirectional,
        BLOCK_SIZE=rows.block_size, NUM_KV_HEADS=num_kv_heads, GROUP=group,
        GROUP_WIDTH=next_power_of_2(group), PAGE_SIZE=page_size, HEAD_DIM=head_dim,
        VALUE_DIM=value_dim, BLOCK_D=next_power_of_2(max(16, head_dim)),
        BLOCK_V=next_power_of_2(max(16, value_dim)),
        QUERIES=schedule.queries, BLOCK_M=blocks.rows, BLOCK_N=blocks.keys,
        PRECISION=dot_precision(q.dtype), num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip


# Arguments that change from step to step are not specialized on: each variant would be compiled
# while serving.
@dependent_kernel(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=[
        "page_table_ptr", "seq_len_ptr", "query_start_ptr", "page_row_ptr",
    ],
)  # fmt: skip
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, sinks_ptr, partial_ptr, lse_ptr, items_ptr, arrived_ptr,
    page_table_ptr, seq_len_ptr, query_start_ptr, page_row_ptr,
    q_token_stride, q_head_stride, table_stride, scale, value_scale,
    RAGGED: tl.constexpr, INDIRECT: tl.constexpr, HAS_SINKS: tl.constexpr,
    SCALES_VALUES: tl.constexpr, CAP: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, BIDIRECTIONAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    item, kv_head = tl.program_id(0), tl.program_id(1)
    cell = items_ptr + item * _WIDTH
    row = tl.load(cell)
    if row < 0:
        return
    begin = tl.load(cell + 1) * QUERIES
    split, length = tl.load(cell + 2), tl.load(cell + 3)
    seq_len, first_token, query_len, table_row = _load_row(
        row, seq_len_ptr, query_start_ptr, page_row_ptr, RAGGED, INDIRECT
    )

    # Positions of the tile's first and last query: in a bidirectional row, all attend as if they
    # were at its last position.
    lowest = seq_len - query_len + begin
    highest_query = seq_len - query_len + tl.minimum(begin + QUERIES, query_len) - 1
    if BIDIRECTIONAL:
        lowest, highest_query = seq_len - 1, seq_len - 1
    start, stop, filled = _split_of(
        lowest, highest_query, split, length, WINDOW, CHUNKED, BLOCK_SIZE
    )
    if split >= filled:
        return

    query, head_in_group, inside = _lanes(begin, query_len, QUERIES, GROUP, GROUP_WIDTH, BLOCK_M)
    head = kv_head * GROUP + head_in_group
    token = (first_token + query).to(tl.int64)
    dimension = tl.arange(0, BLOCK_D)
    q_kept = inside[:, None] & (dimension < HEAD_DIM)[None, :]
    q_place = (token * q_token_stride + head * q_head_stride)[:, None] + dimension[None, :]
    q = tl.load(q_ptr + q_place, mask=q_kept, other=0.0)
    position = seq_len - query_len + query
    if BIDIRECTIONAL:
        position = query * 0 + (seq_len - 1)
    highest, weights, total = _attend(
        start, stop, lowest, highest_query, q, position,
        k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * VALUE_DIM,
        page_table_ptr + table_row * table_stride, scale, CAP, WINDOW, CHUNKED, BLOCK_SIZE, QUERIES,
        NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_D, BLOCK_V, BLOCK_N, PRECISION,
    )  # fmt: skip
    result = token * (NUM_KV_HEADS * GROUP) + head
    if filled == 1:
        column = tl.arange(0, BLOCK_V)
        kept = inside[:, None] & (column < VALUE_DIM)[None, :]
        _finish(
            out_ptr + (result * VALUE_DIM)[:, None] + column[None, :], sinks_ptr + head, highest,
            weights, total, value_scale, inside, kept, HAS_SINKS, SCALES_VALUES,
        )  # fmt: skip
    else:
        # Partial outputs have no padding.
        step = NUM_KV_HEADS * QUERIES * GROUP
        own = kv_head * (QUERIES * GROUP) + (query - begin) * GROUP + head_in_group
        place = (tl.load(cell + 4) - split).to(tl.int64) * step + own
        _leave_part(
            lse_ptr + place, partial_ptr + place * VALUE_DIM,
            arrived_ptr + (item - split) * NUM_KV_HEADS + kv_head, step, split, filled,
            out_ptr + result * VALUE_DIM, sinks_ptr + head, highest, weights, total, value_scale,
            inside, HAS_SINKS, SCALES_VALUES, VALUE_DIM, BLOCK_M, BLOCK_V,
        )  # fmt: skip


@triton.jit
def _load_row(
    row, seq_len_ptr, query_start_ptr, page_row_ptr, RAGGED: tl.constexpr, INDIRECT: tl.constexpr
):  # fmt: skip
    """A row's sequence length, index of its first query among all queries, number of queries, and
    row of the page table."""
    first_token, query_len = row, 1
    if RAGGED:
        first_token = tl.load(query_start_ptr + row)
        query_len = tl.load(query_start_ptr + row + 1) - first_token
    table_row = row.to(tl.int64)
    if INDIRECT:
        table_row = tl.load(page_row_ptr + row).to(tl.int64)
    return tl.load(seq_len_ptr + row), first_token, query_len, table_row


@triton.jit
def _lanes(
    begin, query_len, QUERIES: tl.constexpr, GROUP: tl.constexpr, GROUP_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Rows [M] of a tile: for each, its query, its head among those of the KV head, and whether
    both exist."""
    index = tl.arange(0, BLOCK_M)
    query, head = begin + index // GROUP_WIDTH, index % GROUP_WIDTH
    return query, head, (index // GROUP_WIDTH < QUERIES) & (query < query_len) & (head < GROUP)


@triton.jit
def _window_start(query, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """First position of a query's window; below 0 if the window would begin before position 0."""
    start = query + 1 - WINDOW
    if CHUNKED:
        start = query // WINDOW * WINDOW
    return start


@triton.jit
def _split_of(
    lowest, highest_query, split, length,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """First and last (exclusive) key of a split of `length` keys, and the number of splits of its
    tile. Only keys to which the tile's queries, at positions `lowest` to `highest_query`, attend
    are split."""
    visible = (highest_query // BLOCK_SIZE + 1) * BLOCK_SIZE
    first_key = visible * 0
    if WINDOW > 0:
        first_key = tl.maximum(_window_start(lowest, WINDOW, CHUNKED), 0)
    start = first_key + split * length
    filled = tl.maximum(tl.cdiv(visible - first_key, length), 1)
    return start, tl.minimum(start + length, visible), filled


@triton.jit
def _attend(
    start, stop, lowest, highest_query, q, query, k_ptr, v_ptr, table, scale,
    CAP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax of queries at positions [M] over keys from `start` up to `stop`: highest
    scores, sums of exponentials and weighted sums of values."""
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weights = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    # Keys at or after `clear` are in the windows of all queries, and no key before `border` is in
    # the future of a query: keys in between need no mask, and later ones no mask of windows. The
    # range of a single query begins with its window.
    clear = start
    if WINDOW > 0 and QUERIES > 1:
        passed = tl.maximum(_window_start(highest_query, WINDOW, CHUNKED) - start, 0)
        clear = tl.minimum(start + tl.cdiv(passed, BLOCK_N) * BLOCK_N, stop)
        highest, weights, total = _walk(
            start, clear, stop, True, q, query, k_ptr, v_ptr, table, scale, highest, weights,
            total, CAP, WINDOW, CHUNKED, BLOCK_SIZE, QUERIES, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM,
            VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N, PRECISION,
        )  # fmt: skip
    common = tl.minimum((lowest // BLOCK_SIZE + 1) * BLOCK_SIZE, stop)
    border = clear + tl.maximum(common - clear, 0) // BLOCK_N * BLOCK_N
    highest, weights, total = _walk(
        clear, border, stop, False, q, query, k_ptr, v_ptr, table, scale, highest, weights, total,
        CAP, 0, False, BLOCK_SIZE, QUERIES, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM, VALUE_DIM, BLOCK_D,
        BLOCK_V, BLOCK_N, PRECISION,
    )  # fmt: skip
    return _walk(
        border, stop, stop, True, q, query, k_ptr, v_ptr, table, scale, highest, weights, total,
        CAP, 0, False, BLOCK_SIZE, QUERIES, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM, VALUE_DIM, BLOCK_D,
        BLOCK_V, BLOCK_N, PRECISION,
    )  # fmt: skip


@triton.jit
def _walk(
    start, stop, end, MASKED: tl.constexpr, q, query, k_ptr, v_ptr, table, scale,
    highest, weights, total,
    CAP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Continues an online softmax [M], in powers of 2, with tiles of keys from `start` up to
    `stop`. If MASKED, skips keys at or after `end`, and those that queries at positions [M] do not
    attend to; a single query attends to all keys before `end`. If WINDOW is 0, there is no window,
    or no key precedes one. FP8 keys and values are converted to the dtype of q, which is exact."""
    dimension, column = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    dimension_inside, column_inside = dimension < HEAD_DIM, column < VALUE_DIM
    for block in range(start, stop, BLOCK_N):
        position = block + tl.arange(0, BLOCK_N)
        exists = position < end
        if MASKED:
            page = tl.load(table + position // PAGE_SIZE, mask=exists, other=0)
        else:
            page = tl.load(table + position // PAGE_SIZE)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        k_place = k_ptr + (slot * (NUM_KV_HEADS * HEAD_DIM))[None, :] + dimension[:, None]
        v_place = v_ptr + (slot * (NUM_KV_HEADS * VALUE_DIM))[:, None] + column[None, :]
        if MASKED:
            k = tl.load(k_place, mask=exists[None, :] & dimension_inside[:, None], other=0.0)
        elif HEAD_DIM < BLOCK_D:
            k = tl.load(k_place, mask=dimension_inside[:, None], other=0.0)
        else:
            k = tl.load(k_place)
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
        # Factor from scores to exponents of 2; multiplying is fused with the subtraction below.
        factor = scale * LOG2E
        if CAP > 0.0:
            # tanh(x) = 1 - 2 / (exp(2 * x) + 1), which is 1 if exp overflows.
            grown = tl.exp2(scores * (scale * (2.0 * LOG2E / CAP)))
            scores = (CAP * LOG2E) * (1.0 - 2.0 / (grown + 1.0))
            factor = 1.0
        if MASKED:
            seen = exists[None, :]
            if QUERIES > 1:
                seen = seen & (position[None, :] < (query[:, None] // BLOCK_SIZE + 1) * BLOCK_SIZE)
            if CHUNKED:
                seen = seen & (position[None, :] >= (query // WINDOW * WINDOW)[:, None])
            elif WINDOW > 0:
                seen = seen & (position[None, :] > query[:, None] - WINDOW)
            scores = tl.where(seen, scores, _HIDDEN)
            v = tl.load(v_place, mask=exists[:, None] & column_inside[None, :], other=0.0)
        elif VALUE_DIM < BLOCK_V:
            v = tl.load(v_place, mask=column_inside[None, :], other=0.0)
        else:
            v = tl.load(v_place)
        new_highest = tl.maximum(highest, tl.max(scores, axis=1) * factor)
        shrink = tl.exp2(highest - new_highest)
        probability = tl.exp2(scores * factor - new_highest[:, None])
        weights = weights * shrink + tl.sum(probability, axis=1)
        total = total * shrink[:, None]
        v = v.to(q.dtype)
        total = tl.dot(probability.to(v.dtype), v, total, input_precision=PRECISION)
        highest = new_highest
    return highest, weights, total


@triton.jit
def _leave_part(
    lse_ptr, partial_ptr, counter, step, split, filled, out_ptr, sink_ptr,
    highest, weights, total, value_scale, inside, HAS_SINKS: tl.constexpr,
    SCALES_VALUES: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Stores a split's partial result; the last program of a tile merges all splits. Pointers [M]
    point to the first split's partial results, and to the output."""
    safe = tl.where(weights > 0, weights, 1.0)
    column = tl.arange(0, BLOCK_V)
    kept = inside[:, None] & (column < VALUE_DIM)[None, :]
    tl.store(lse_ptr + split * step, highest + tl.log2(safe), mask=inside)
    part_ptr = (partial_ptr + split * step * VALUE_DIM)[:, None] + column[None, :]
    tl.store(part_ptr, total / safe[:, None], mask=kept)
    # HAZARD(order): all threads' stores must precede the count, and the count must precede all
    # loads of other splits.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == filled - 1
    tl.debug_barrier()
    if is_last:
        tl.store(counter, 0)
        _merge(
            lse_ptr, partial_ptr, step, filled, out_ptr, sink_ptr, value_scale, inside, HAS_SINKS,
            SCALES_VALUES, VALUE_DIM, BLOCK_M, BLOCK_V,
        )  # fmt: skip


@triton.jit
def _merge(
    lse_ptr, partial_ptr, step, filled, out_ptr, sink_ptr, value_scale, inside,
    HAS_SINKS: tl.constexpr, SCALES_VALUES: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Merges all splits of a tile in order, as many columns at a time as fit into registers next to
    a partial output."""
    WIDTH: tl.constexpr = BLOCK_V if BLOCK_M * BLOCK_V <= _MERGED else _MERGED // BLOCK_M
    for start in range(0, BLOCK_V, WIDTH):
        column = start + tl.arange(0, WIDTH)
        kept = inside[:, None] & (column < VALUE_DIM)[None, :]
        highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        weights = tl.zeros((BLOCK_M,), tl.float32)
        total = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        for other in range(0, filled):
            part_ptr = (partial_ptr + other * step * VALUE_DIM)[:, None] + column[None, :]
            lse = tl.load(lse_ptr + other * step, mask=inside, other=0.0)
            part = tl.load(part_ptr, mask=kept, other=0.0)
            new_highest = tl.maximum(highest, lse)
            shrink = tl.exp2(highest - new_highest)
            weight = tl.exp2(lse - new_highest)
            total = total * shrink[:, None] + part * weight[:, None]
            weights = weights * shrink + weight
            highest = new_highest
        _finish(
            out_ptr[:, None] + column[None, :], sink_ptr, highest, weights, total, value_scale,
            inside, kept, HAS_SINKS, SCALES_VALUES,
        )  # fmt: skip


@triton.jit
def _finish(
    out_ptr, sink_ptr, highest, weights, total, value_scale, inside, kept,
    HAS_SINKS: tl.constexpr, SCALES_VALUES: tl.constexpr,
):  # fmt: skip
    """Scales values, adds sinks to a softmax and stores its output."""
    if SCALES_VALUES:
        total = total * value_scale
    if HAS_SINKS:
        sink = tl.load(sink_ptr, mask=inside, other=0.0) * LOG2E
        new_highest = tl.maximum(highest, sink)
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink[:, None]
        weights = weights * shrink + tl.exp2(sink - new_highest)
    result = total / tl.where(weights > 0, weights, 1.0)[:, None]
    tl.store(out_ptr, result.to(out_ptr.dtype.element_ty), mask=kept)
