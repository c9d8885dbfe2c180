"""Triton Kimi Delta Attention by position: a program keeps a block of columns of a row's state in
registers from the row's first token to its last."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.gated_delta_rule.base import LENGTH_EPS
from kernels.kimi_delta_attention.base import KimiDeltaLayer, KimiGates
from kernels.states import StateRows
from kernels.tiles import cdiv, next_power_of_2

COLUMNS: Final = 32
"""Columns of a state per program: few, so that a single row has enough programs."""


def advance_by_position(
    x: torch.Tensor,
    gates: KimiGates,
    layer: KimiDeltaLayer,
    states: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
    *,
    most_tokens: int,
) -> None:
    """Launches a grid of (rows, heads, blocks of columns), for rows with up to `most_tokens`
    tokens. Writes the outputs to out [T, H * V] and updates the states."""
    num_heads, key_dim, value_dim = len(layer.log_rate), layer.key_dim, len(layer.norm)
    columns = min(COLUMNS, next_power_of_2(value_dim))
    _steps_by_channel_kernel[len(rows.slots), num_heads, cdiv(value_dim, columns)](
        x, gates.decay, gates.share, layer.log_rate, layer.step_bias, states, out,
        gates.decay.stride(0), gates.share.stride(0),
        rows.slots, rows.starts, rows.piece_starts, rows.piece_targets, rows.row_pieces,
        rows.slots if rows.kept is None else rows.kept,
        key_dim**-0.5, LENGTH_EPS,
        HEADS=num_heads, KEY=key_dim, VALUE=value_dim, MOST_TOKENS=most_tokens,
        BLOCK_K=next_power_of_2(key_dim), BLOCK_V=columns,
    )  # fmt: skip


@triton.jit
def decays_of(a, bias, rate):
    """Logarithms of decays, from their projections."""
    a = a.to(tl.float32) + bias
    # Softplus, which is linear where torch's is linear; the exponential would overflow there.
    return -rate * tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))


@dependent_kernel(
    do_not_specialize_on_alignment=[
        *("slot_ptr", "start_ptr", "piece_ptr", "target_ptr", "row_piece_ptr", "kept_ptr")
    ]
)
def _steps_by_channel_kernel(
    x_ptr, decay_ptr, share_ptr, rate_ptr, bias_ptr, state_ptr, out_ptr,
    decay_stride, share_stride,
    slot_ptr, start_ptr, piece_ptr, target_ptr, row_piece_ptr, kept_ptr, scale, length_eps,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MOST_TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    piece, last_piece = tl.load(row_piece_ptr + row), tl.load(row_piece_ptr + row + 1)
    row_first, row_end = tl.load(piece_ptr + piece), tl.load(piece_ptr + last_piece)
    if (row_end == row_first) | (row_end - row_first > MOST_TOKENS):
        return
    slot = tl.load(slot_ptr + row)
    is_first = tl.load(start_ptr + row) == 0
    key, value = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = key < KEY, value < VALUE
    own = state_ptr + (head * KEY + key[:, None]) * VALUE + value[None, :]
    in_cell = in_key[:, None] & in_value[None, :]
    state = tl.load(own + slot * (HEADS * KEY * VALUE), mask=in_cell & (is_first == 0), other=0.0)
    rate = tl.exp(tl.load(rate_ptr + head))
    bias = tl.load(bias_ptr + head * KEY + key, mask=in_key, other=0.0)
    for number in range(piece, last_piece):
        end = tl.load(piece_ptr + number + 1)
        for token in range(tl.load(piece_ptr + number), end):
            inputs = x_ptr + token * (HEADS * (2 * KEY + VALUE))
            queries = inputs + head * KEY + key
            q = tl.load(queries, mask=in_key, other=0.0).to(tl.float32)
            k = tl.load(queries + HEADS * KEY, mask=in_key, other=0.0).to(tl.float32)
            q = q * (scale / tl.sqrt(tl.sum(q * q, axis=0) + length_eps))
            k = k * (1.0 / tl.sqrt(tl.sum(k * k, axis=0) + length_eps))
            values = inputs + 2 * HEADS * KEY + head * VALUE + value
            v = tl.load(values, mask=in_value, other=0.0).to(tl.float32)
            decays = decay_ptr + token * decay_stride + head * KEY + key
            decay = decays_of(tl.load(decays, mask=in_key, other=0.0), bias, rate)
            b = tl.load(share_ptr + token * share_stride + head).to(tl.float32)
            state = state * tl.exp(decay)[:, None]
            missing = (v - tl.sum(state * k[:, None], axis=0)) * (1.0 / (1.0 + tl.exp(-b)))
            state = state + k[:, None] * missing[None, :]
            output = tl.sum(state * q[:, None], axis=0).to(out_ptr.dtype.element_ty)
            target = out_ptr + token * (HEADS * VALUE) + head * VALUE + value
            tl.store(target, output, mask=in_value)
        snapshot = tl.load(target_ptr + number)
        if snapshot >= 0:
            tl.store(own + snapshot * (HEADS * KEY * VALUE), state, mask=in_cell)
    if tl.load(kept_ptr + row) >= 0:
        tl.store(own + slot * (HEADS * KEY * VALUE), state, mask=in_cell)
