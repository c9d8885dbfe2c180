"""Triton selective scan: a program keeps a block of columns of a row's state in registers from the
row's first token to its last. Results do not depend on other rows or on how rows are split."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Final

import torch
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.registry import implements
from kernels.selective_scan import ScanLayer, selective_scan
from kernels.states import StateRows
from kernels.tiles import cdiv, next_power_of_2

_COLUMNS: Final = 32
"""Columns of a state per program: few, so that a single row has enough programs."""


@implements(selective_scan, "triton")
def launch_selective_scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    layer: ScanLayer,
    states: torch.Tensor,
    rows: StateRows,
    *,
    by_position: bool,
) -> torch.Tensor:
    """Launches a grid of (rows, heads, blocks of columns)."""
    num_heads, head_dim, state_dim = len(layer.log_rate), layer.head_dim, layer.state_dim
    out = x.new_empty(len(x), num_heads * head_dim)
    if not len(x):
        return out
    columns = min(_COLUMNS, next_power_of_2(head_dim))
    _scan_kernel[len(rows.slots), num_heads, cdiv(head_dim, columns)](
        x, steps, steps.stride(0), layer.log_rate, layer.step_bias, layer.skip, states, out,
        rows.slots, rows.starts, rows.piece_starts, rows.piece_targets, rows.row_pieces,
        rows.slots if rows.kept is None else rows.kept,
        HEADS=num_heads, GROUPS=layer.num_groups, WIDTH=head_dim, STATE=state_dim,
        BLOCK_N=next_power_of_2(state_dim), BLOCK_P=columns,
    )  # fmt: skip
    return out


@dependent_kernel(
    do_not_specialize_on_alignment=[
        *("slot_ptr", "start_ptr", "piece_ptr", "target_ptr", "row_piece_ptr", "kept_ptr")
    ]
)
def _scan_kernel(
    x_ptr, step_ptr, step_stride, rate_ptr, bias_ptr, skip_ptr, state_ptr, out_ptr,
    slot_ptr, start_ptr, piece_ptr, target_ptr, row_piece_ptr, kept_ptr,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    piece, last_piece = tl.load(row_piece_ptr + row), tl.load(row_piece_ptr + row + 1)
    if tl.load(piece_ptr + piece) == tl.load(piece_ptr + last_piece):
        return
    slot = tl.load(slot_ptr + row)
    is_first = tl.load(start_ptr + row) == 0
    n, column = tl.arange(0, BLOCK_N), block * BLOCK_P + tl.arange(0, BLOCK_P)
    in_state, in_head = n < STATE, column < WIDTH
    in_cell = in_state[:, None] & in_head[None, :]
    own = state_ptr + head * (STATE * WIDTH) + n[:, None] * WIDTH + column[None, :]
    state = tl.load(own + slot * (HEADS * STATE * WIDTH), mask=in_cell & (is_first == 0), other=0.0)
    rate = tl.exp(tl.load(rate_ptr + head))
    bias, skip = tl.load(bias_ptr + head), tl.load(skip_ptr + head)
    shared = HEADS * WIDTH + head // (HEADS // GROUPS) * STATE + n
    for number in range(piece, last_piece):
        end = tl.load(piece_ptr + number + 1)
        for token in range(tl.load(piece_ptr + number), end):
            inputs = x_ptr + token * (HEADS * WIDTH + 2 * GROUPS * STATE)
            values = inputs + head * WIDTH + column
            x = tl.load(values, mask=in_head, other=0.0).to(tl.float32)
            b = tl.load(inputs + shared, mask=in_state, other=0.0).to(tl.float32)
            c = tl.load(inputs + GROUPS * STATE + shared, mask=in_state, other=0.0).to(tl.float32)
            step = tl.load(step_ptr + token * step_stride + head).to(tl.float32) + bias
            # Softplus, which is linear where torch's is linear; exp would overflow there.
            step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
            state = state * tl.exp(-rate * step) + b[:, None] * (step * x)[None, :]
            output = tl.sum(state * c[:, None], axis=0) + skip * x
            target = out_ptr + token * (HEADS * WIDTH) + head * WIDTH + column
            tl.store(target, output.to(out_ptr.dtype.element_ty), mask=in_head)
        snapshot = tl.load(target_ptr + number)
        if snapshot >= 0:
            tl.store(own + snapshot * (HEADS * STATE * WIDTH), state, mask=in_cell)
    if tl.load(kept_ptr + row) >= 0:
        tl.store(own + slot * (HEADS * STATE * WIDTH), state, mask=in_cell)
