"""Triton delta rule by chunks (arXiv 2412.06464, section 3.3).

A chunk's updates of the state depend on those of its earlier positions: a triangular system. Terms
that do not depend on the state are computed for all chunks at once; then a program per row, head
and block of columns computes the states of the row's chunks one after another.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.gated_delta_rule.base import DeltaLayer
from kernels.gated_delta_rule.triton_inputs import PreparedInputs
from kernels.gated_delta_rule.triton_steps import COLUMNS, store_state
from kernels.states import PIECE, StateCache, StateRows
from kernels.tiles import cdiv, next_power_of_2

_FETCHING_AHEAD: Final = (80, 90)
"""Compute capabilities (90 is 9.0) on which the next chunk's factors are fetched while a chunk is
computed. This takes 123 KB of shared memory, but 8.6, 8.9 and 12.0 have only 99 KB per program
(CUDA C++ guide, table 30). Compiled for 10.0, it spills registers."""


class _Solved(NamedTuple):
    """Terms of a step's chunks that do not depend on the state, in the dtype of the projections.
    With the state S before a chunk, its updates are u - w S."""

    w: torch.Tensor
    """[T, H, K]: factors of S."""
    u: torch.Tensor
    """[T, H, V]: updates for S = 0."""
    scores: torch.Tensor
    """[T, H, PIECE]: decayed dot products of queries with the keys of their chunk up to their own
    position."""
    fade: torch.Tensor
    """[T, H] fp32: logarithms of the decay since the chunk began."""


def advance_by_pieces(
    projected: torch.Tensor,
    inputs: PreparedInputs,
    layer: DeltaLayer,
    cache: StateCache,
    rows: StateRows,
    out: torch.Tensor,
    *,
    least_tokens: int,
) -> None:
    """Launches two grids: (chunks, heads) and (rows, heads, blocks of columns), for rows with at
    least `least_tokens` tokens. Writes the outputs to out [T, H * V] and updates the states."""
    num_tokens, num_heads, value_dim = inputs.v.shape
    num_rows, num_pieces, key_dim = len(rows.slots), len(rows.piece_rows), layer.key_dim
    channels = cache.conv.shape[2]
    shared = {
        "KEY_HEADS": layer.num_key_heads,
        "HEADS": num_heads,
        "KEY": key_dim,
        "VALUE": value_dim,
        "LEAST_TOKENS": least_tokens,
        "PIECE": PIECE,
        "BLOCK_K": next_power_of_2(key_dim),
    }
    block_v = next_power_of_2(value_dim)
    solved = _Solved(
        inputs.v.new_empty(num_tokens, num_heads, key_dim),
        torch.empty_like(inputs.v),
        inputs.v.new_empty(num_tokens, num_heads, PIECE),
        inputs.gates.new_empty(num_tokens, num_heads),
    )
    pieces = (rows.piece_starts, rows.piece_rows, rows.row_pieces)
    _solve_kernel[num_pieces, num_heads](
        *inputs, *solved, *pieces, **shared, BLOCK_V=block_v, num_warps=8
    )
    columns = min(COLUMNS, block_v)
    num_blocks = cdiv(value_dim, columns)
    _states_kernel[num_rows, num_heads, num_blocks](
        projected, projected.stride(0), inputs.qk, *solved, cache.conv, cache.recurrent, out,
        rows.slots, rows.starts, rows.piece_starts, rows.piece_targets, rows.row_pieces,
        **shared, CHANNELS=channels, TAPS=len(layer.conv), BLOCK_V=columns,
        SHARE=cdiv(channels, num_heads * num_blocks),
        num_warps=4, num_stages=_count_stages(inputs.v.dtype),
    )  # fmt: skip


def _count_stages(dtype: torch.dtype) -> int:
    """Number of chunks in flight."""
    try:
        capability = triton.runtime.driver.active.get_current_target().arch
    except (RuntimeError, AssertionError):  # no device, as in Triton's interpreter
        return 1
    return 2 if dtype.itemsize == 2 and capability in _FETCHING_AHEAD else 1


@triton.jit
def count_tokens(row, piece_ptr, row_piece_ptr):
    """Number of the row's tokens."""
    first = tl.load(piece_ptr + tl.load(row_piece_ptr + row))
    return tl.load(piece_ptr + tl.load(row_piece_ptr + row + 1)) - first


@triton.jit
def multiply(a, b, DTYPE: tl.constexpr):
    """Matmul of operands of type DTYPE, accumulated in fp32; uses tensor cores unless DTYPE is
    fp32."""
    return tl.dot(a.to(DTYPE), b.to(DTYPE), input_precision="ieee")


@dependent_kernel(do_not_specialize_on_alignment=["piece_ptr", "piece_row_ptr", "row_piece_ptr"])
def _solve_kernel(
    qk_ptr, v_ptr, gate_ptr, w_ptr, u_ptr, score_ptr, fade_ptr,
    piece_ptr, piece_row_ptr, row_piece_ptr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    LEAST_TOKENS: tl.constexpr, PIECE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
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
    # Decays since the chunk began, and between any two of its positions. The upper triangle is also
    # masked before exp: its exponents are positive and may overflow.
    gates = gate_ptr + token * (2 * HEADS) + head
    fade = tl.cumsum(tl.load(gates, mask=inside, other=0.0), axis=0)
    share = tl.load(gates + HEADS, mask=inside, other=0.0)
    tl.store(fade_ptr + token * HEADS + head, fade, mask=inside)
    earlier = position[:, None] >= position[None, :]
    between = tl.exp(tl.where(earlier, fade[:, None] - fade[None, :], 0.0))
    # Dot products of keys with keys, and of queries with keys.
    key = tl.arange(0, BLOCK_K)[None, :]
    in_key = inside[:, None] & (key < KEY)
    columns = token[:, None] * (2 * KEY_HEADS * KEY) + head // (HEADS // KEY_HEADS) * KEY + key
    k = tl.load(qk_ptr + KEY_HEADS * KEY + columns, mask=in_key, other=0.0)
    q = tl.load(qk_ptr + columns, mask=in_key, other=0.0)
    scores = tl.where(earlier, multiply(q, tl.trans(k), DTYPE) * between, 0.0)
    cells = (token[:, None] * HEADS + head) * PIECE + position[None, :]
    tl.store(score_ptr + cells, scores.to(DTYPE), mask=inside[:, None])
    overlap = multiply(k, tl.trans(k), DTYPE) * between * share[:, None]
    before = position[:, None] > position[None, :]
    inverse = inverse_of(tl.where(before, overlap, 0.0), DTYPE, PIECE)
    # The system's solutions for values, and for what the state before the chunk predicts.
    value = tl.arange(0, BLOCK_V)[None, :]
    in_value = inside[:, None] & (value < VALUE)
    cells = (token[:, None] * HEADS + head) * VALUE + value
    v = tl.load(v_ptr + cells, mask=in_value, other=0.0).to(tl.float32)
    u = multiply(inverse, v * share[:, None], DTYPE)
    tl.store(u_ptr + cells, u.to(DTYPE), mask=in_value)
    w = multiply(inverse, k.to(tl.float32) * (share * tl.exp(fade))[:, None], DTYPE)
    cells = (token[:, None] * HEADS + head) * KEY + key
    tl.store(w_ptr + cells, w.to(DTYPE), mask=in_key)


@triton.jit
def inverse_of(system, DTYPE: tl.constexpr, PIECE: tl.constexpr):
    """Inverse of I + `system`, where `system` is strictly lower triangular [PIECE, PIECE]. Diagonal
    blocks of 4 rows are inverted first, then those of 16, then those of 64. Powers of larger
    blocks would grow, and cancel each other when keys repeat."""
    tl.static_assert(PIECE == 64)
    row, column = tl.arange(0, PIECE)[:, None], tl.arange(0, PIECE)[None, :]
    identity = tl.where(row == column, 1.0, 0.0)
    inverse = _sum_powers(tl.where(row // 4 == column // 4, system, 0.0), identity, DTYPE)
    for_16 = (row // 16 == column // 16) & (row // 4 != column // 4)
    n = _multiply_exactly(inverse, tl.where(for_16, system, 0.0), DTYPE)
    inverse = _multiply_exactly(_sum_powers(n, identity, DTYPE), inverse, DTYPE)
    n = _multiply_exactly(inverse, tl.where(row // 16 != column // 16, system, 0.0), DTYPE)
    return _multiply_exactly(_sum_powers(n, identity, DTYPE), inverse, DTYPE)


@triton.jit
def _sum_powers(n, identity, DTYPE: tl.constexpr):
    """Inverse of I + n, where the fourth power of n is 0."""
    square = _multiply_exactly(n, n, DTYPE)
    return identity - n + square - _multiply_exactly(n, square, DTYPE)


@triton.jit
def _multiply_exactly(a, b, DTYPE: tl.constexpr):
    """Matmul of fp32 matrices with a higher precision than DTYPE: TF32 on tensor cores if DTYPE has
    16 bits."""
    if DTYPE.is_fp32():
        product = tl.dot(a, b, input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision="tf32")
    return product


@dependent_kernel(
    do_not_specialize_on_alignment=[
        *("slot_ptr", "start_ptr", "piece_ptr", "target_ptr", "row_piece_ptr")
    ]
)
def _states_kernel(
    x_ptr, x_stride, qk_ptr, w_ptr, u_ptr, score_ptr, fade_ptr, conv_ptr, state_ptr, out_ptr,
    slot_ptr, start_ptr, piece_ptr, target_ptr, row_piece_ptr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    LEAST_TOKENS: tl.constexpr, PIECE: tl.constexpr, BLOCK_K: tl.constexpr,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK_V: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if count_tokens(row, piece_ptr, row_piece_ptr) < LEAST_TOKENS:
        return
    DTYPE: tl.constexpr = w_ptr.dtype.element_ty
    piece, last_piece = tl.load(row_piece_ptr + row), tl.load(row_piece_ptr + row + 1)
    row_first, row_end = tl.load(piece_ptr + piece), tl.load(piece_ptr + last_piece)
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
        token = first + position
        of_head = token * HEADS + head
        in_row = inside[:, None] & in_key[None, :]
        w = tl.load(w_ptr + of_head[:, None] * KEY + key[None, :], mask=in_row, other=0.0)
        cells = of_head[:, None] * VALUE + value[None, :]
        in_out = inside[:, None] & in_value[None, :]
        u = tl.load(u_ptr + cells, mask=in_out, other=0.0).to(tl.float32)
        updates = u - multiply(w, state, DTYPE)
        # Outputs of the state before the chunk, and of the chunk's own updates.
        fade = tl.load(fade_ptr + of_head, mask=inside, other=0.0)
        columns = token[:, None] * (2 * KEY_HEADS * KEY)
        columns += head // (HEADS // KEY_HEADS) * KEY + key[None, :]
        q = tl.load(qk_ptr + columns, mask=in_row, other=0.0)
        output = multiply(q, state, DTYPE) * tl.exp(fade)[:, None]
        score_cells = of_head[:, None] * PIECE + position[None, :]
        scores = tl.load(score_ptr + score_cells, mask=inside[:, None], other=0.0)
        output += multiply(scores, updates, DTYPE)
        tl.store(out_ptr + cells, output.to(out_ptr.dtype.element_ty), mask=in_out)
        # The state after the chunk.
        last = tl.load(fade_ptr + (end - 1) * HEADS + head)
        k = tl.load(qk_ptr + KEY_HEADS * KEY + columns, mask=in_row, other=0.0).to(tl.float32)
        left = k * tl.exp(tl.where(inside, last - fade, 0.0))[:, None]
        state = state * tl.exp(last) + multiply(tl.trans(left), updates, DTYPE)
        target = tl.load(target_ptr + number)
        if target >= 0:
            store_state(
                own, state, in_cell, x_ptr, x_stride, conv_ptr, slot, target, row_first, end,
                is_first, HEADS * KEY * VALUE, CHANNELS, TAPS, SHARE, False,
            )  # fmt: skip
    store_state(
        own, state, in_cell, x_ptr, x_stride, conv_ptr, slot, slot, row_first, row_end,
        is_first, HEADS * KEY * VALUE, CHANNELS, TAPS, SHARE, True,
    )  # fmt: skip
