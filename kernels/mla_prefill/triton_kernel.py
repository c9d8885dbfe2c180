"""Triton attention of MLA prompts to expanded keys.

A program computes a block of queries of one row and head. Keys are contiguous and have two parts:
one without rotary embedding, which is stored next to the values, and a rotary one, which all heads
share. If a row has several chunks of keys, a program continues the softmax of the previous chunk.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention.triton_config import compute_capability, dot_precision
from kernels.attention.triton_kernel import _HIDDEN, LOG2E
from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.mla_prefill import SoftmaxState, attend_to_expanded
from kernels.mla_prefill.base import ExpandedRows, KeyPiece
from kernels.registry import implements
from kernels.tiles import cdiv, next_power_of_2


class _Blocks(NamedTuple):
    """Tile sizes and launch parameters."""

    queries: int
    keys: int
    warps: int
    stages: int


_WIDE = _Blocks(16, 16, 8, 1)
"""Tiles for 4-byte elements; larger ones would spill registers."""
_AMPERE = _Blocks(64, 32, 4, 2)
_HOPPER = _Blocks(128, 64, 8, 3)


def _blocks(dtype: torch.dtype) -> _Blocks:
    if dtype.itemsize == 4:
        return _WIDE
    return _HOPPER if compute_capability() >= 90 else _AMPERE


@implements(attend_to_expanded, "triton")
def launch_attend_to_expanded(
    q: torch.Tensor,
    expanded: torch.Tensor,
    rotary: torch.Tensor,
    out: torch.Tensor,
    rows: ExpandedRows,
    piece: KeyPiece,
    state: SoftmaxState,
    *,
    scale: float,
    value_scale: float = 1.0,
) -> None:
    """Launches a grid of (blocks of queries of the longest row, heads, rows)."""
    num_heads, value_dim, rotary_dim = out.shape[1], out.shape[2], rotary.shape[1]
    plain_dim = q.shape[2] - rotary_dim
    blocks = _blocks(q.dtype)
    longest = max(rows.query_lens_host[piece.first_row : piece.last_row])
    grid = cdiv(longest, blocks.queries), num_heads, piece.last_row - piece.first_row
    _expanded_kernel[grid](
        q, expanded, rotary, out, *state,
        rows.query_start, rows.seq_lens, rows.key_start,
        q.stride(0), q.stride(1), rotary.stride(0), piece.first_row, piece.start, piece.stop,
        scale, value_scale,
        NUM_HEADS=num_heads, PLAIN=plain_dim, ROTARY=rotary_dim, VALUE_DIM=value_dim,
        BLOCK_P=next_power_of_2(max(16, plain_dim)), BLOCK_R=next_power_of_2(max(16, rotary_dim)),
        BLOCK_V=next_power_of_2(max(16, value_dim)), BLOCK_M=blocks.queries, BLOCK_N=blocks.keys,
        PRECISION=dot_precision(q.dtype), num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip


@dependent_kernel(
    do_not_specialize=["first_row", "first_key", "last_key"],
    do_not_specialize_on_alignment=["query_start_ptr", "seq_len_ptr", "key_start_ptr"],
)
def _expanded_kernel(
    q_ptr, expanded_ptr, rotary_ptr, out_ptr, output_ptr, lse_ptr,
    query_start_ptr, seq_len_ptr, key_start_ptr,
    q_token_stride, q_head_stride, rotary_stride, first_row, first_key, last_key,
    scale, value_scale,
    NUM_HEADS: tl.constexpr, PLAIN: tl.constexpr, ROTARY: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    # Later queries have more keys: they come first, so that no long program starts last.
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head, row = tl.program_id(1), first_row + tl.program_id(2)
    first_query = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - first_query
    seq_len = tl.load(seq_len_ptr + row)
    # Positions below are relative to the first key of the chunk.
    first = seq_len - query_len - first_key
    lowest, highest_query = first + begin, first + tl.minimum(begin + BLOCK_M, query_len) - 1
    if (begin >= query_len) | (highest_query < 0):
        return

    index = begin + tl.arange(0, BLOCK_M)
    inside = index < query_len
    query = first + index
    token = (first_query + index).to(tl.int64)
    plain, rotated = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_R)
    q_place = q_ptr + (token * q_token_stride + head * q_head_stride)[:, None]
    q = tl.load(
        q_place + plain[None, :], mask=inside[:, None] & (plain < PLAIN)[None, :], other=0.0
    )
    rotated_q = tl.load(
        q_place + PLAIN + rotated[None, :],
        mask=inside[:, None] & (rotated < ROTARY)[None, :], other=0.0,
    )  # fmt: skip

    column = tl.arange(0, BLOCK_V)
    kept = inside[:, None] & (column < VALUE_DIM)[None, :]
    place = token * NUM_HEADS + head
    value_place = (place * VALUE_DIM)[:, None] + column[None, :]
    is_later = first_key > 0
    highest = tl.load(lse_ptr + place, mask=inside & is_later, other=float("-inf"))
    total = tl.load(output_ptr + value_place, mask=kept & is_later, other=0.0)
    weights = tl.zeros((BLOCK_M,), tl.float32) + is_later.to(tl.float32)

    # No key before `border` is in the future of a query.
    stop = tl.minimum(highest_query + 1, last_key - first_key)
    border = tl.minimum(tl.maximum(lowest + 1, 0), stop) // BLOCK_N * BLOCK_N
    before = tl.load(key_start_ptr + row) - tl.load(key_start_ptr + first_row)
    keys = expanded_ptr + (before.to(tl.int64) * NUM_HEADS + head) * (PLAIN + VALUE_DIM)
    rotary = rotary_ptr + before.to(tl.int64) * rotary_stride
    highest, weights, total = _walk(
        0, border, False, q, rotated_q, query, keys, rotary, rotary_stride, scale,
        highest, weights, total, NUM_HEADS, PLAIN, ROTARY, VALUE_DIM, BLOCK_P, BLOCK_R, BLOCK_V,
        BLOCK_N, PRECISION,
    )  # fmt: skip
    highest, weights, total = _walk(
        border, stop, True, q, rotated_q, query, keys, rotary, rotary_stride, scale,
        highest, weights, total, NUM_HEADS, PLAIN, ROTARY, VALUE_DIM, BLOCK_P, BLOCK_R, BLOCK_V,
        BLOCK_N, PRECISION,
    )  # fmt: skip

    total = total / weights[:, None]
    is_done = highest_query < last_key - first_key
    tl.store(lse_ptr + place, highest + tl.log2(weights), mask=inside & ~is_done)
    tl.store(output_ptr + value_place, total, mask=kept & ~is_done)
    result = total * value_scale
    tl.store(out_ptr + value_place, result.to(out_ptr.dtype.element_ty), mask=kept & is_done)


@triton.jit
def _walk(
    start, stop, MASKED: tl.constexpr, q, rotated_q, query, keys, rotary, rotary_stride, scale,
    highest, weights, total,
    NUM_HEADS: tl.constexpr, PLAIN: tl.constexpr, ROTARY: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Continues an online softmax [M], in powers of 2, with tiles of keys from `start` up to
    `stop`. If MASKED, skips keys at or after `stop`, and those after a query's position [M]."""
    plain, rotated, column = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    for block in range(start, stop, BLOCK_N):
        position = block + tl.arange(0, BLOCK_N)
        exists = position < stop
        # Keys of a chunk take less than 2^31 bytes.
        key_row = position * (NUM_HEADS * (PLAIN + VALUE_DIM))
        k_place = keys + key_row[None, :] + plain[:, None]
        v_place = keys + PLAIN + key_row[:, None] + column[None, :]
        r_place = rotary + (position * rotary_stride)[None, :] + rotated[:, None]
        if MASKED:
            k = tl.load(k_place, mask=exists[None, :] & (plain < PLAIN)[:, None], other=0.0)
            r = tl.load(r_place, mask=exists[None, :] & (rotated < ROTARY)[:, None], other=0.0)
        elif PLAIN < BLOCK_P or ROTARY < BLOCK_R:
            k = tl.load(k_place, mask=(plain < PLAIN)[:, None], other=0.0)
            r = tl.load(r_place, mask=(rotated < ROTARY)[:, None], other=0.0)
        else:
            k = tl.load(k_place)
            r = tl.load(r_place)
        scores = tl.dot(q, k, input_precision=PRECISION)
        scores = tl.dot(rotated_q, r, scores, input_precision=PRECISION)
        factor = scale * LOG2E
        if MASKED:
            seen = exists[None, :] & (position[None, :] <= query[:, None])
            scores = tl.where(seen, scores, _HIDDEN)
            v = tl.load(v_place, mask=exists[:, None] & (column < VALUE_DIM)[None, :], other=0.0)
        elif VALUE_DIM < BLOCK_V:
            v = tl.load(v_place, mask=(column < VALUE_DIM)[None, :], other=0.0)
        else:
            v = tl.load(v_place)
        new_highest = tl.maximum(highest, tl.max(scores, axis=1) * factor)
        shrink = tl.exp2(highest - new_highest)
        probability = tl.exp2(scores * factor - new_highest[:, None])
        weights = weights * shrink + tl.sum(probability, axis=1)
        total = total * shrink[:, None]
        total = tl.dot(probability.to(v.dtype), v, total, input_precision=PRECISION)
        highest = new_highest
    return highest, weights, total
