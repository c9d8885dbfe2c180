"""Triton extend attention: ragged queries over paged keys, cached prefix and new tokens alike.

One stage: a program owns (row, query head, block of queries) and walks the row's keys from
the first to the last that any of its queries sees, with an online softmax.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.base import AttentionMetadata
from kernels.attention.triton_config import dot_precision, extend_blocks
from kernels.attention.triton_decode import cap_scores, fold_block, shares_with_sink


def extend_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Launch for all rows."""
    assert metadata.query_start is not None, "extends say where their queries begin"
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.shape[0] == 0:
        return out
    num_q_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads, page_size = k_cache.shape[2], k_cache.shape[1]
    blocks = extend_blocks(head_dim, q.dtype)
    grid = (
        metadata.page_table.shape[0],
        num_q_heads,
        triton.cdiv(max(metadata.query_lens_host), blocks.queries),
    )
    _extend_kernel[grid](
        q, k_cache, v_cache, out, q if sinks is None else sinks,
        metadata.page_table, metadata.seq_lens, metadata.query_start,
        q.stride(0), q.stride(1), metadata.page_table.stride(0), scale,
        NUM_KV_HEADS=num_kv_heads, GROUP=num_q_heads // num_kv_heads, PAGE_SIZE=page_size,
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(max(16, head_dim)),
        BLOCK_SIZE=metadata.block_size, BLOCK_M=blocks.queries, BLOCK_N=blocks.keys,
        WINDOW=metadata.window, CAP=cap, HAS_SINKS=sinks is not None,
        PRECISION=dot_precision(q.dtype),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return out


@triton.jit
def _hide(scores, position, exists, query, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr):
    """Masks what queries at positions [M] do not see of a block's scores [M, N]."""
    seen = exists[None, :] & (position[None, :] < (query[:, None] // BLOCK_SIZE + 1) * BLOCK_SIZE)
    if WINDOW > 0:
        # A query may see nothing of the first blocks: what a finite score weighs is nothing beside
        # that of its own position, which comes last; -inf alone would make no number.
        seen = seen & (position[None, :] > query[:, None] - WINDOW)
        scores = tl.where(seen, scores, -1.0e30)
    else:
        # Position 0 is visible to every query, so no row of the first block is all masked.
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["page_table_ptr", "seq_len_ptr", "query_start_ptr"],
)
def _extend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, sinks_ptr, page_table_ptr, seq_len_ptr, query_start_ptr,
    q_token_stride, q_head_stride, table_stride, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    kv_head = head // GROUP
    first = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - first
    prefix = tl.load(seq_len_ptr + row) - query_len

    query = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    query_inside = query < query_len
    column = tl.arange(0, BLOCK_D)
    column_inside = column < HEAD_DIM
    token = (first + query).to(tl.int64)
    q = tl.load(
        q_ptr + token[:, None] * q_token_stride + head * q_head_stride + column[None, :],
        mask=query_inside[:, None] & column_inside[None, :],
        other=0.0,
    )
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weights = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # Blocks of queries past the row's end have nothing to walk.
    last = tl.minimum((tl.program_id(2) + 1) * BLOCK_M, query_len)
    visible = ((prefix + last - 1) // BLOCK_SIZE + 1) * BLOCK_SIZE
    stop = tl.where(tl.program_id(2) * BLOCK_M < query_len, visible, 0)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(prefix + tl.program_id(2) * BLOCK_M + 1 - WINDOW, 0)
    for block in range(start, stop, BLOCK_N):
        position = block + tl.arange(0, BLOCK_N)
        exists = position < stop
        page = tl.load(
            page_table_ptr + row * table_stride + position // PAGE_SIZE, mask=exists, other=0
        )
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        offset = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM
        k = tl.load(
            k_ptr + offset[None, :] + column[:, None],
            mask=exists[None, :] & column_inside[:, None],
            other=0.0,
        )
        scores = cap_scores(tl.dot(q, k, input_precision=PRECISION) * scale, CAP)
        scores = _hide(scores, position, exists, prefix + query, BLOCK_SIZE, WINDOW)
        v = tl.load(
            v_ptr + offset[:, None] + column[None, :],
            mask=exists[:, None] & column_inside[None, :],
            other=0.0,
        )
        highest, weights, total = fold_block(scores, v, highest, weights, total, PRECISION)

    if HAS_SINKS:
        shrink, share = shares_with_sink(tl.load(sinks_ptr + head), highest)
        total = total * shrink[:, None]
        weights = weights * shrink + share
    out_offset = (token * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    result = total / tl.where(weights > 0, weights, 1.0)[:, None]
    tl.store(
        out_ptr + out_offset[:, None] + column[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=query_inside[:, None] & column_inside[None, :],
    )
