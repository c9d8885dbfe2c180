"""Triton decode attention: split keys, grouped query heads.

Stage 1: a program owns (query, group of heads that share a kv head, split of the keys) and
leaves a normalised partial output with its log-sum-exp. Stage 2 folds a query's splits in order.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention.triton_config import (
    INVARIANT_SPLIT_TOKENS,
    MAX_INVARIANT_PARTIALS,
    MAX_SPLITS,
    MIN_SPLIT_TOKENS,
    decode_blocks,
    dot_precision,
)

# Programs that fill a large GPU; fewer splits are made once the batch alone provides them.
_TARGET_PROGRAMS = 512


class VisibleRows(NamedTuple):
    """What each of n queries attends to."""

    page_table: torch.Tensor
    """[B, P] int32."""
    visible_lens: torch.Tensor
    """[n] int32: its first positions."""
    page_rows: torch.Tensor | None = None
    """[n] int32: its row of the page table; None where query i has row i."""
    window: int = 0
    """The last of these positions alone; 0 for all."""

    def part(self, queries: slice) -> VisibleRows:
        """That of some of the queries."""
        lengths = self.visible_lens[queries]
        if self.page_rows is None:
            return VisibleRows(self.page_table[queries], lengths, window=self.window)
        return VisibleRows(self.page_table, lengths, self.page_rows[queries], self.window)


def attend_in_splits(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: VisibleRows,
    most_visible: int,
    scale: float,
    cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with each query of q [n, Hq, D]; each one's keys are divided evenly into as many
    splits as fill the device."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.shape[0]:
        num_splits = count_splits(q.shape[0] * k_cache.shape[2], most_visible)
        _launch(q, k_cache, v_cache, out, rows, num_splits, 0, scale, cap, sinks)
    return out


def attend_in_fixed_splits(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: VisibleRows,
    most_visible: int,
    scale: float,
    cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with splits of a fixed length: a query's bits depend on nothing but its own keys.

    In pieces of queries: the number of splits grows with what a query sees, and so would the
    partial outputs.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_splits = max(1, triton.cdiv(most_visible, INVARIANT_SPLIT_TOKENS))
    step = max(1, MAX_INVARIANT_PARTIALS // num_splits)
    for start in range(0, q.shape[0], step):
        part = slice(start, start + step)
        _launch(
            q[part], k_cache, v_cache, out[part], rows.part(part), num_splits,
            INVARIANT_SPLIT_TOKENS, scale, cap, sinks,
        )  # fmt: skip
    return out


def count_splits(programs_per_split: int, most_visible: int) -> int:
    """How many splits of the keys fill the device, where each is worth its while."""
    wanted = -(-_TARGET_PROGRAMS // programs_per_split)
    useful = -(-most_visible // MIN_SPLIT_TOKENS)
    return max(1, min(wanted, useful, MAX_SPLITS))


def _launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    rows: VisibleRows,
    num_splits: int,
    split_tokens: int,
    scale: float,
    cap: float,
    sinks: torch.Tensor | None,
) -> None:
    """Both stages. `split_tokens` fixes the keys per split; 0 divides each query's keys evenly."""
    num_queries, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = k_cache.shape[2], k_cache.shape[1]
    group = num_q_heads // num_kv_heads
    blocks = decode_blocks(head_dim, q.dtype)
    block_d = triton.next_power_of_2(max(16, head_dim))
    partial = torch.empty(
        num_queries, num_q_heads, num_splits, head_dim, dtype=torch.float32, device=q.device
    )
    lse = torch.empty(num_queries, num_q_heads, num_splits, dtype=torch.float32, device=q.device)
    common = {"SPLIT_TOKENS": split_tokens, "BLOCK_N": blocks.keys, "HEAD_DIM": head_dim,
              "BLOCK_D": block_d, "WINDOW": rows.window}  # fmt: skip
    head_blocks = triton.cdiv(group, blocks.queries)
    _split_kernel[(num_queries, num_kv_heads * head_blocks, num_splits)](
        q, k_cache, v_cache, partial, lse, rows.page_table, rows.visible_lens,
        rows.visible_lens if rows.page_rows is None else rows.page_rows,
        q.stride(0), q.stride(1), rows.page_table.stride(0), scale,
        INDIRECT=rows.page_rows is not None, NUM_KV_HEADS=num_kv_heads, GROUP=group,
        PAGE_SIZE=page_size, BLOCK_H=blocks.queries, PRECISION=dot_precision(q.dtype), CAP=cap,
        num_warps=blocks.warps, num_stages=blocks.stages, **common,
    )  # fmt: skip
    merge_splits(
        partial, lse, out, rows.visible_lens, keys=blocks.keys, split_tokens=split_tokens,
        window=rows.window, sinks=sinks,
    )  # fmt: skip


def merge_splits(
    partial: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    visible_lens: torch.Tensor,
    *,
    keys: int,
    split_tokens: int = 0,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> None:
    """The second stage: folds each query's splits into `out` [n, Hq, D].

    Args:
        partial: [n, Hq, splits, D] fp32.
        lse: [n, Hq, splits] fp32.
        out: what is written.
        visible_lens: [n], as in `VisibleRows`.
        keys: of a block in the first stage.
        split_tokens: as in `_launch`.
        window: as in `VisibleRows`.
        sinks: [Hq] fp32.
    """
    num_queries, num_q_heads, num_splits, head_dim = partial.shape
    _merge_kernel[(num_queries, num_q_heads)](
        partial, lse, out, lse if sinks is None else sinks, visible_lens, num_splits,
        HAS_SINKS=sinks is not None, SPLIT_TOKENS=split_tokens, BLOCK_N=keys, HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(max(16, head_dim)), WINDOW=window, num_warps=2,
    )  # fmt: skip


@triton.jit
def _first_visible(visible, WINDOW: tl.constexpr):
    first = visible * 0
    if WINDOW > 0:
        first = tl.maximum(visible - WINDOW, 0)
    return first


@triton.jit
def split_length(
    visible, num_splits, SPLIT_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Keys of a split: so many tokens, or where that is 0 an even share in whole blocks."""
    if SPLIT_TOKENS > 0:
        length = visible * 0 + SPLIT_TOKENS
    else:
        length = tl.cdiv(tl.cdiv(visible, num_splits), BLOCK_N) * BLOCK_N
    return length


@triton.jit
def cap_scores(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP); without a cap, of 0, the scores themselves."""
    if CAP > 0.0:
        # tanh(x) = 1 - 2 / (exp(2 * x) + 1), which ends in 1 where exp overflows.
        scores = CAP * (1.0 - 2.0 / (tl.exp(scores * (2.0 / CAP)) + 1.0))
    return scores


@triton.jit
def shares_with_sink(sink, highest):
    """What a running state shrinks by where a sink joins it, and what that adds to its weights."""
    new_highest = tl.maximum(highest, sink)
    return tl.exp(highest - new_highest), tl.exp(sink - new_highest)


@triton.jit
def fold_block(scores, v, highest, weights, total, PRECISION: tl.constexpr):
    """Online softmax: fold a block's scores [M, N] and values [N, D] into the running state."""
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    shrink = tl.exp(highest - new_highest)
    probability = tl.exp(scores - new_highest[:, None])
    product = tl.dot(probability.to(v.dtype), v, input_precision=PRECISION)
    total = total * shrink[:, None] + product
    weights = weights * shrink + tl.sum(probability, axis=1)
    return new_highest, weights, total


# What changes from step to step is not specialised on: each variant costs a compilation in the
# middle of serving.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["page_table_ptr", "visible_ptr", "page_row_ptr"],
)
def _split_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, lse_ptr, page_table_ptr, visible_ptr, page_row_ptr,
    q_token_stride, q_head_stride, table_stride, scale,
    INDIRECT: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) % NUM_KV_HEADS
    head_in_group = (tl.program_id(1) // NUM_KV_HEADS) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)

    visible = tl.load(visible_ptr + query)
    table_row = query
    if INDIRECT:
        table_row = tl.load(page_row_ptr + query).to(tl.int64)
    # Splits are counted from the first position that the query sees: of its own alone.
    first = _first_visible(visible, WINDOW)
    length = split_length(visible - first, num_splits, SPLIT_TOKENS, BLOCK_N)
    start = first + split * length
    stop = tl.minimum(start + length, visible)

    head = kv_head * GROUP + head_in_group
    column = tl.arange(0, BLOCK_D)
    head_inside = head_in_group < GROUP
    column_inside = column < HEAD_DIM
    q = tl.load(
        q_ptr + query * q_token_stride + head[:, None] * q_head_stride + column[None, :],
        mask=head_inside[:, None] & column_inside[None, :],
        other=0.0,
    )
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    weights = tl.zeros((BLOCK_H,), tl.float32)
    total = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    for block in range(start, stop, BLOCK_N):
        position = block + tl.arange(0, BLOCK_N)
        seen = position < stop
        page = tl.load(
            page_table_ptr + table_row * table_stride + position // PAGE_SIZE, mask=seen, other=0
        )
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        offset = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM
        k = tl.load(
            k_ptr + offset[None, :] + column[:, None],
            mask=seen[None, :] & column_inside[:, None],
            other=0.0,
        )
        scores = cap_scores(tl.dot(q, k, input_precision=PRECISION) * scale, CAP)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        v = tl.load(
            v_ptr + offset[:, None] + column[None, :],
            mask=seen[:, None] & column_inside[None, :],
            other=0.0,
        )
        highest, weights, total = fold_block(scores, v, highest, weights, total, PRECISION)

    # An empty split is never read by stage 2, and need not be finite; the guards keep it quiet.
    safe_weights = tl.where(weights > 0, weights, 1.0)
    row = (query * (NUM_KV_HEADS * GROUP) + head) * num_splits + split
    tl.store(
        partial_ptr + row[:, None] * HEAD_DIM + column[None, :],
        total / safe_weights[:, None],
        mask=head_inside[:, None] & column_inside[None, :],
    )
    tl.store(lse_ptr + row, highest + tl.log(safe_weights), mask=head_inside)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["visible_ptr"])
def _merge_kernel(
    partial_ptr, lse_ptr, out_ptr, sinks_ptr, visible_ptr, num_splits, HAS_SINKS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    row = query * tl.num_programs(1) + tl.program_id(1)
    column = tl.arange(0, BLOCK_D)
    inside = column < HEAD_DIM
    visible = tl.load(visible_ptr + query)
    visible -= _first_visible(visible, WINDOW)
    length = split_length(visible, num_splits, SPLIT_TOKENS, BLOCK_N)
    filled = tl.cdiv(visible, tl.maximum(length, 1))

    highest = float("-inf")
    weights = 0.0
    total = tl.zeros((BLOCK_D,), tl.float32)
    for split in range(0, filled):
        lse = tl.load(lse_ptr + row * num_splits + split)
        part = tl.load(
            partial_ptr + (row * num_splits + split) * HEAD_DIM + column, mask=inside, other=0.0
        )
        new_highest = tl.maximum(highest, lse)
        shrink = tl.exp(highest - new_highest)
        weight = tl.exp(lse - new_highest)
        total = total * shrink + part * weight
        weights = weights * shrink + weight
        highest = new_highest
    if HAS_SINKS:
        shrink, share = shares_with_sink(tl.load(sinks_ptr + tl.program_id(1)), highest)
        total = total * shrink
        weights = weights * shrink + share
    result = total / tl.where(weights > 0, weights, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + column, result.to(out_ptr.dtype.element_ty), mask=inside)
