"""Triton Kimi Delta Attention by chunks (arXiv 2510.26692, section 3).

As for the gated delta net, a chunk's updates of the state are the solution of a triangular system,
and terms that do not depend on the state are computed for all chunks at once. Decays differ by
dimension, so they are applied to keys and queries before these are multiplied: between blocks of 16
positions relative to the later block's first position, so that all exponents are at most 0, and
within a block for each pair of positions.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.gated_delta_rule.base import LENGTH_EPS
from kernels.gated_delta_rule.triton_pieces import count_tokens, inverse_of, multiply
from kernels.kimi_delta_attention.base import KimiDeltaLayer, KimiGates
from kernels.kimi_delta_attention.triton_steps import COLUMNS, decays_of
from kernels.states import PIECE, StateRows
from kernels.tiles import cdiv, next_power_of_2

_BLOCK: Final = 16
"""Positions per block: the minimum rows of a `tl.dot`."""


class _Faded(NamedTuple):
    """Inputs of a step's chunks: L2-normalized queries and keys, in the dtype of x, and decays."""

    q: torch.Tensor
    """[T, H, K]: scaled queries."""
    k: torch.Tensor
    """[T, H, K]: keys."""
    fade: torch.Tensor
    """[T, H, K] fp32: logarithms of the decay since the start of the chunk."""
    since: torch.Tensor
    """[T, H, K]: queries, decayed since the start of the chunk."""
    until: torch.Tensor
    """[T, H, K]: keys, decayed until the end of the chunk."""


class _Solved(NamedTuple):
    """Terms of a step's chunks that do not depend on the state, in the dtype of x. With the state S
    before a chunk, its updates are u - w S."""

    w: torch.Tensor
    """[T, H, K]: factors of S."""
    u: torch.Tensor
    """[T, H, V]: updates for S = 0."""


def advance_by_pieces(
    x: torch.Tensor,
    gates: KimiGates,
    layer: KimiDeltaLayer,
    states: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
    *,
    least_tokens: int,
) -> None:
    """Launches four grids: (chunks, heads), (chunks, heads, blocks of positions), (chunks, heads)
    and (rows, heads, blocks of columns), for rows with at least `least_tokens` tokens. Writes the
    outputs to out [T, H * V] and updates the states."""
    num_heads, key_dim, value_dim = len(layer.log_rate), layer.key_dim, len(layer.norm)
    num_tokens, num_pieces = len(x), len(rows.piece_rows)
    sizes = {
        "HEADS": num_heads,
        "KEY": key_dim,
        "LEAST_TOKENS": least_tokens,
        "PIECE": PIECE,
        "BLOCK_K": next_power_of_2(key_dim),
    }
    by_key = (num_tokens, num_heads, key_dim)
    q, k, since, until, w = (x.new_empty(by_key) for _ in range(5))
    faded = _Faded(q, k, x.new_empty(by_key, dtype=torch.float32), since, until)
    solved = _Solved(w, x.new_empty(num_tokens, num_heads, value_dim))
    scores = x.new_empty(num_tokens, num_heads, PIECE)
    overlap = torch.empty_like(scores, dtype=torch.float32)
    pieces = (rows.piece_starts, rows.piece_rows, rows.row_pieces)
    _fade_kernel[num_pieces, num_heads](
        x, gates.decay, gates.decay.stride(0), layer.log_rate, layer.step_bias, *faded, *pieces,
        key_dim**-0.5, LENGTH_EPS, **sizes, VALUE=value_dim, num_warps=8,
    )  # fmt: skip
    _pair_kernel[num_pieces, num_heads, PIECE // _BLOCK](
        *faded[:3], gates.share, gates.share.stride(0), scores, overlap, *pieces,
        **sizes, BLOCK=_BLOCK,
    )  # fmt: skip
    _solve_by_channel_kernel[num_pieces, num_heads](
        x, *faded[1:3], gates.share, gates.share.stride(0), overlap, *solved, *pieces,
        **sizes, VALUE=value_dim, BLOCK_V=next_power_of_2(value_dim), num_warps=8,
    )  # fmt: skip
    columns = min(COLUMNS, next_power_of_2(value_dim))
    _states_by_channel_kernel[len(rows.slots), num_heads, cdiv(value_dim, columns)](
        *solved, scores, *faded[2:], states, out,
        rows.slots, rows.starts, rows.piece_starts, rows.piece_targets, rows.row_pieces,
        **sizes, VALUE=value_dim, BLOCK_V=columns, num_warps=4, num_stages=1,
    )  # fmt: skip


@dependent_kernel(do_not_specialize_on_alignment=["piece_ptr", "piece_row_ptr", "row_piece_ptr"])
def _fade_kernel(
    x_ptr, decay_ptr, decay_stride, rate_ptr, bias_ptr,
    q_ptr, k_ptr, fade_ptr, since_ptr, until_ptr,
    piece_ptr, piece_row_ptr, row_piece_ptr, scale, length_eps,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, LEAST_TOKENS: tl.constexpr,
    PIECE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    piece, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(piece_ptr + piece)
    count = tl.load(piece_ptr + piece + 1) - first
    row_tokens = count_tokens(tl.load(piece_row_ptr + piece), piece_ptr, row_piece_ptr)
    if (count == 0) | (row_tokens < LEAST_TOKENS):
        return
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    position, key = tl.arange(0, PIECE)[:, None], tl.arange(0, BLOCK_K)[None, :]
    inside = (position < count) & (key < KEY)
    token = first + position
    column = head * KEY + key
    rate = tl.exp(tl.load(rate_ptr + head))
    bias = tl.load(bias_ptr + column, mask=key < KEY, other=0.0)
    decay = tl.load(decay_ptr + token * decay_stride + column, mask=inside, other=0.0)
    decay = tl.where(inside, decays_of(decay, bias, rate), 0.0)
    fade = tl.cumsum(decay, axis=0)
    cells = token * (HEADS * KEY) + column
    tl.store(fade_ptr + cells, fade, mask=inside)
    queries = x_ptr + token * (HEADS * (2 * KEY + VALUE)) + column
    q = tl.load(queries, mask=inside, other=0.0).to(tl.float32)
    q = q * (scale / tl.sqrt(tl.sum(q * q, axis=1) + length_eps))[:, None]
    tl.store(q_ptr + cells, q.to(DTYPE), mask=inside)
    tl.store(since_ptr + cells, (q * tl.exp(fade)).to(DTYPE), mask=inside)
    k = tl.load(queries + HEADS * KEY, mask=inside, other=0.0).to(tl.float32)
    k = k * (1.0 / tl.sqrt(tl.sum(k * k, axis=1) + length_eps))[:, None]
    tl.store(k_ptr + cells, k.to(DTYPE), mask=inside)
    rest = tl.sum(decay, axis=0)[None, :] - fade
    tl.store(until_ptr + cells, (k * tl.exp(tl.minimum(rest, 0.0))).to(DTYPE), mask=inside)


@dependent_kernel(do_not_specialize_on_alignment=["piece_ptr", "piece_row_ptr", "row_piece_ptr"])
def _pair_kernel(
    q_ptr, k_ptr, fade_ptr, share_ptr, share_stride, score_ptr, overlap_ptr,
    piece_ptr, piece_row_ptr, row_piece_ptr,
    HEADS: tl.constexpr, KEY: tl.constexpr, LEAST_TOKENS: tl.constexpr, PIECE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decayed dot products of a block's queries with the keys up to their own position, and of its
    keys with earlier keys; the latter are multiplied by step sizes."""
    wait_for_previous_kernel()
    piece, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(piece_ptr + piece)
    count = tl.load(piece_ptr + piece + 1) - first
    row_tokens = count_tokens(tl.load(piece_row_ptr + piece), piece_ptr, row_piece_ptr)
    if (count <= block * BLOCK) | (row_tokens < LEAST_TOKENS):
        return
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    row, key = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    here, in_key = row < count - block * BLOCK, key < KEY
    token = first + block * BLOCK + row
    share = tl.load(share_ptr + token * share_stride + head, mask=here, other=0.0)
    share = 1.0 / (1.0 + tl.exp(-share.to(tl.float32)))
    inside = here[:, None] & in_key[None, :]
    cells = (token[:, None] * HEADS + head) * KEY + key[None, :]
    q = tl.load(q_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    fade = tl.load(fade_ptr + cells, mask=inside, other=0.0)
    target = (token[:, None] * HEADS + head) * PIECE + row[None, :]
    # Earlier blocks, which are full.
    begun = ((first + block * BLOCK) * HEADS + head) * KEY + key
    border = tl.load(fade_ptr + begun, mask=in_key, other=0.0)[None, :]
    left = tl.exp(tl.where(here[:, None], fade - border, 0.0))
    faded_q, faded_k = q * left, k * left
    for earlier in range(block):
        others = ((first + earlier * BLOCK + row)[:, None] * HEADS + head) * KEY + key[None, :]
        keys = tl.load(k_ptr + others, mask=in_key[None, :], other=0.0).to(tl.float32)
        own_fade = tl.load(fade_ptr + others, mask=in_key[None, :], other=0.0)
        keys = tl.trans(keys * tl.exp(border - own_fade))
        place = target + earlier * BLOCK
        scores = multiply(faded_q, keys, DTYPE)
        tl.store(score_ptr + place, scores.to(DTYPE), mask=here[:, None])
        overlap = multiply(faded_k, keys, DTYPE) * share[:, None]
        tl.store(overlap_ptr + place, overlap, mask=here[:, None])
    # The block itself, column by column.
    own_scores = tl.zeros([BLOCK, BLOCK], tl.float32)
    own_overlap = tl.zeros([BLOCK, BLOCK], tl.float32)
    for column in range(min(BLOCK, count - block * BLOCK)):
        one = begun + column * (HEADS * KEY)
        key_of_column = tl.load(k_ptr + one, mask=in_key, other=0.0).to(tl.float32)[None, :]
        own_fade = tl.load(fade_ptr + one, mask=in_key, other=0.0)[None, :]
        since = here & (row >= column)
        faded = key_of_column * tl.exp(tl.where(since[:, None], fade - own_fade, 0.0))
        is_column = (row[None, :] == column) & since[:, None]
        own_scores = tl.where(is_column, tl.sum(q * faded, axis=1)[:, None], own_scores)
        own_overlap = tl.where(is_column, tl.sum(k * faded, axis=1)[:, None], own_overlap)
    place = target + block * BLOCK
    tl.store(score_ptr + place, own_scores.to(DTYPE), mask=here[:, None])
    tl.store(overlap_ptr + place, own_overlap * share[:, None], mask=here[:, None])


@dependent_kernel(do_not_specialize_on_alignment=["piece_ptr", "piece_row_ptr", "row_piece_ptr"])
def _solve_by_channel_kernel(
    x_ptr, k_ptr, fade_ptr, share_ptr, share_stride, overlap_ptr, w_ptr, u_ptr,
    piece_ptr, piece_row_ptr, row_piece_ptr,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, LEAST_TOKENS: tl.constexpr,
    PIECE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    piece, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(piece_ptr + piece)
    count = tl.load(piece_ptr + piece + 1) - first
    row_tokens = count_tokens(tl.load(piece_row_ptr + piece), piece_ptr, row_piece_ptr)
    if (count == 0) | (row_tokens < LEAST_TOKENS):
        return
    DTYPE: tl.constexpr = w_ptr.dtype.element_ty
    position = tl.arange(0, PIECE)
    inside = position < count
    token = first + position
    of_head = token[:, None] * HEADS + head
    before = inside[:, None] & (position[:, None] > position[None, :])
    cells = overlap_ptr + of_head * PIECE + position[None, :]
    inverse = inverse_of(tl.load(cells, mask=before, other=0.0), DTYPE, PIECE)
    share = tl.load(share_ptr + token * share_stride + head, mask=inside, other=0.0)
    share = (1.0 / (1.0 + tl.exp(-share.to(tl.float32))))[:, None]
    # The system's solutions for values, and for what the state before the chunk predicts.
    value = tl.arange(0, BLOCK_V)[None, :]
    in_value = inside[:, None] & (value < VALUE)
    values = token[:, None] * (HEADS * (2 * KEY + VALUE)) + 2 * HEADS * KEY + head * VALUE + value
    v = tl.load(x_ptr + values, mask=in_value, other=0.0).to(tl.float32)
    u = multiply(inverse, v * share, DTYPE)
    tl.store(u_ptr + of_head * VALUE + value, u.to(DTYPE), mask=in_value)
    key = tl.arange(0, BLOCK_K)[None, :]
    in_key = inside[:, None] & (key < KEY)
    k = tl.load(k_ptr + of_head * KEY + key, mask=in_key, other=0.0).to(tl.float32)
    fade = tl.load(fade_ptr + of_head * KEY + key, mask=in_key, other=0.0)
    w = multiply(inverse, k * tl.exp(fade) * share, DTYPE)
    tl.store(w_ptr + of_head * KEY + key, w.to(DTYPE), mask=in_key)


@dependent_kernel(
    do_not_specialize_on_alignment=[
        *("slot_ptr", "start_ptr", "piece_ptr", "target_ptr", "row_piece_ptr")
    ]
)
def _states_by_channel_kernel(
    w_ptr, u_ptr, score_ptr, fade_ptr, since_ptr, until_ptr, state_ptr, out_ptr,
    slot_ptr, start_ptr, piece_ptr, target_ptr, row_piece_ptr,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, LEAST_TOKENS: tl.constexpr,
    PIECE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if count_tokens(row, piece_ptr, row_piece_ptr) < LEAST_TOKENS:
        return
    DTYPE: tl.constexpr = w_ptr.dtype.element_ty
    piece, last_piece = tl.load(row_piece_ptr + row), tl.load(row_piece_ptr + row + 1)
    slot = tl.load(slot_ptr + row)
    is_first = tl.load(start_ptr + row) == 0
    key, value = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = key < KEY, value < VALUE
    own = state_ptr + (head * KEY + key[:, None]) * VALUE + value[None, :]
    in_cell = in_key[:, None] & in_value[None, :]
    state = tl.load(own + slot * (HEADS * KEY * VALUE), mask=in_cell & (is_first == 0), other=0.0)
    position = tl.arange(0, PIECE)
    for number in range(piece, last_piece):
        first, end = tl.load(piece_ptr + number), tl.load(piece_ptr + number + 1)
        inside = position < end - first
        of_head = (first + position)[:, None] * HEADS + head
        in_row = inside[:, None] & in_key[None, :]
        factors = of_head * KEY + key[None, :]
        w = tl.load(w_ptr + factors, mask=in_row, other=0.0)
        cells = of_head * VALUE + value[None, :]
        in_out = inside[:, None] & in_value[None, :]
        u = tl.load(u_ptr + cells, mask=in_out, other=0.0).to(tl.float32)
        updates = u - multiply(w, state, DTYPE)
        # Outputs of the state before the chunk, and of the chunk's own updates.
        since = tl.load(since_ptr + factors, mask=in_row, other=0.0)
        output = multiply(since, state, DTYPE)
        own_scores = score_ptr + of_head * PIECE + position[None, :]
        earlier = inside[:, None] & (position[:, None] >= position[None, :])
        output += multiply(tl.load(own_scores, mask=earlier, other=0.0), updates, DTYPE)
        tl.store(out_ptr + cells, output.to(out_ptr.dtype.element_ty), mask=in_out)
        # The state after the chunk.
        last = tl.load(fade_ptr + ((end - 1) * HEADS + head) * KEY + key, mask=in_key, other=0.0)
        until = tl.load(until_ptr + factors, mask=in_row, other=0.0)
        state = state * tl.exp(last)[:, None] + multiply(tl.trans(until), updates, DTYPE)
        snapshot = tl.load(target_ptr + number)
        if snapshot >= 0:
            tl.store(own + snapshot * (HEADS * KEY * VALUE), state, mask=in_cell)
    tl.store(own + slot * (HEADS * KEY * VALUE), state, mask=in_cell)
