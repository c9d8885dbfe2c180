"""Triton delta rule by position: a program keeps a block of columns of a row's state in registers
from the row's first token to its last."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.gated_delta_rule.base import DeltaLayer
from kernels.gated_delta_rule.triton_inputs import PreparedInputs
from kernels.short_convolution.triton_kernel import store_window
from kernels.states import StateCache, StateRows
from kernels.tiles import cdiv, next_power_of_2

COLUMNS: Final = 32
"""Columns of a state per program: few, so that a single row has enough programs."""


def advance_by_position(
    projected: torch.Tensor,
    inputs: PreparedInputs,
    layer: DeltaLayer,
    cache: StateCache,
    rows: StateRows,
    out: torch.Tensor,
    *,
    most_tokens: int,
) -> None:
    """Launches a grid of (rows, heads, blocks of columns), for rows with up to `most_tokens`
    tokens. Writes the outputs to out [T, H * V] and updates the states."""
    num_heads, value_dim = len(layer.log_rate), len(layer.norm)
    channels = cache.conv.shape[2]
    columns = min(COLUMNS, next_power_of_2(value_dim))
    num_blocks = cdiv(value_dim, columns)
    _steps_kernel[len(rows.slots), num_heads, num_blocks](
        projected, projected.stride(0), *inputs, cache.conv, cache.recurrent, out,
        rows.slots, rows.starts, rows.piece_starts, rows.piece_targets, rows.row_pieces,
        rows.slots if rows.kept is None else rows.kept,
        KEY_HEADS=layer.num_key_heads, HEADS=num_heads, KEY=layer.key_dim, VALUE=value_dim,
        CHANNELS=channels, TAPS=len(layer.conv), MOST_TOKENS=most_tokens,
        BLOCK_K=next_power_of_2(layer.key_dim), BLOCK_V=columns,
        SHARE=cdiv(channels, num_heads * num_blocks),
    )  # fmt: skip


@dependent_kernel(
    do_not_specialize_on_alignment=[
        *("slot_ptr", "start_ptr", "piece_ptr", "target_ptr", "row_piece_ptr", "kept_ptr")
    ]
)
def _steps_kernel(
    x_ptr, x_stride, qk_ptr, v_ptr, gate_ptr, conv_ptr, state_ptr, out_ptr,
    slot_ptr, start_ptr, piece_ptr, target_ptr, row_piece_ptr, kept_ptr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, MOST_TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SHARE: tl.constexpr,
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
    cell = key[:, None] * VALUE + value[None, :]
    in_cell = in_key[:, None] & in_value[None, :]
    own = state_ptr + head * (KEY * VALUE) + cell
    state = tl.load(own + slot * (HEADS * KEY * VALUE), mask=in_cell & (is_first == 0), other=0.0)
    query_column = head // (HEADS // KEY_HEADS) * KEY + key
    value_column = head * VALUE + value
    for number in range(piece, last_piece):
        end = tl.load(piece_ptr + number + 1)
        for token in range(tl.load(piece_ptr + number), end):
            queries = qk_ptr + token * (2 * KEY_HEADS * KEY) + query_column
            q = tl.load(queries, mask=in_key, other=0.0).to(tl.float32)
            k = tl.load(queries + KEY_HEADS * KEY, mask=in_key, other=0.0).to(tl.float32)
            values = v_ptr + token * (HEADS * VALUE) + value_column
            v = tl.load(values, mask=in_value, other=0.0).to(tl.float32)
            gates = gate_ptr + token * (2 * HEADS) + head
            state = state * tl.exp(tl.load(gates))
            missing = (v - tl.sum(state * k[:, None], axis=0)) * tl.load(gates + HEADS)
            state = state + k[:, None] * missing[None, :]
            output = tl.sum(state * q[:, None], axis=0).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + token * (HEADS * VALUE) + value_column, output, mask=in_value)
        target = tl.load(target_ptr + number)
        if target >= 0:
            store_state(
                own, state, in_cell, x_ptr, x_stride, conv_ptr, slot, target, row_first, end,
                is_first, HEADS * KEY * VALUE, CHANNELS, TAPS, SHARE, False,
            )  # fmt: skip
    if tl.load(kept_ptr + row) >= 0:
        store_state(
            own, state, in_cell, x_ptr, x_stride, conv_ptr, slot, slot, row_first, row_end,
            is_first, HEADS * KEY * VALUE, CHANNELS, TAPS, SHARE, True,
        )  # fmt: skip


@triton.jit
def store_state(
    cells, state, in_cell, x_ptr, x_stride, conv_ptr, slot, target, row_first, end, is_first,
    SIZE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, SHARE: tl.constexpr,
    IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Stores a program's part of the state after token `end` - 1 to state `target`.

    The part is a block of the recurrent state, and the last inputs of the convolution for SHARE
    channels. The block's `cells` are those of state 0; a state has SIZE numbers. Inputs before the
    row's first token are in the state of `slot`, which is `target` if IN_PLACE. The grid is (rows,
    heads, blocks of columns).
    """
    tl.store(cells + target * SIZE, state, mask=in_cell)
    store_window(
        x_ptr, x_stride, conv_ptr, slot, target, row_first, end, is_first,
        tl.program_id(1) * tl.num_programs(2) + tl.program_id(2), CHANNELS, TAPS, SHARE, IN_PLACE,
    )  # fmt: skip
