"""Triton short convolution: outputs by chunks of rows, then the states by rows. States are
stored in a separate launch, since several chunks read what is overwritten."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.registry import implements
from kernels.short_convolution import short_convolution
from kernels.states import StateRows
from kernels.tiles import cdiv

_CHANNELS: Final = 256
"""Channels per program."""
_RUNS: Final = 4
"""Number of programs among which the tokens of a chunk are divided."""


@implements(short_convolution, "triton")
def launch_short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: StateRows,
    *,
    has_silu: bool = False,
) -> torch.Tensor:
    """Launches grids of (chunks, runs of tokens, blocks of channels) and (rows, blocks)."""
    num_taps, channels = weight.shape
    out = x.new_empty(len(x), channels)
    if not len(x):
        return out
    num_blocks = cdiv(channels, _CHANNELS)
    runs = 1 if rows.longest == 1 else _RUNS
    _convolution_kernel[len(rows.piece_rows), runs, num_blocks](
        x, x.stride(0), weight, weight if bias is None else bias, states, out,
        rows.slots, rows.starts, rows.piece_starts, rows.piece_rows, rows.row_pieces,
        CHANNELS=channels, TAPS=num_taps, HAS_BIAS=bias is not None, HAS_SILU=has_silu,
        BLOCK=_CHANNELS,
    )  # fmt: skip
    _windows_kernel[len(rows.slots), num_blocks](
        x, x.stride(0), states,
        rows.slots, rows.starts, rows.piece_starts, rows.piece_targets, rows.row_pieces,
        rows.slots if rows.kept is None else rows.kept,
        CHANNELS=channels, TAPS=num_taps, BLOCK=_CHANNELS,
    )  # fmt: skip
    return out


_ROW_ARRAYS = [
    *("slot_ptr", "start_ptr", "piece_ptr", "piece_row_ptr", "target_ptr", "row_piece_ptr")
]
"""Names of the arguments that point into the step's staged inputs. Their alignment varies; kernels
are not specialized on it, so that one binary serves all."""


@dependent_kernel(
    do_not_specialize_on_alignment=[name for name in _ROW_ARRAYS if name != "target_ptr"]
)
def _convolution_kernel(
    x_ptr, x_stride, weight_ptr, bias_ptr, state_ptr, out_ptr,
    slot_ptr, start_ptr, piece_ptr, piece_row_ptr, row_piece_ptr,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    piece = tl.program_id(0)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    row = tl.load(piece_row_ptr + piece)
    row_first = tl.load(piece_ptr + tl.load(row_piece_ptr + row))
    own = state_ptr + tl.load(slot_ptr + row) * (TAPS - 1) * CHANNELS
    is_first = tl.load(start_ptr + row) == 0
    first = tl.load(piece_ptr + piece) + tl.program_id(1)
    for token in range(first, tl.load(piece_ptr + piece + 1), tl.num_programs(1)):
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(TAPS):
            index = token - row_first + (tap - TAPS + 1)
            new = x_ptr + (row_first + index) * x_stride + channel
            x = tl.load(new, mask=inside & (index >= 0), other=0.0).to(tl.float32)
            if tap < TAPS - 1:
                old = own + (index + TAPS - 1) * CHANNELS + channel
                is_old = inside & (index < 0) & (is_first == 0)
                x += tl.load(old, mask=is_old, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + tap * CHANNELS + channel, mask=inside, other=0.0)
            total += x * weight.to(tl.float32)
        if HAS_BIAS:
            total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        if HAS_SILU:
            total = total / (1.0 + tl.exp(-total))
        out = out_ptr + token * CHANNELS + channel
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


@dependent_kernel(
    do_not_specialize_on_alignment=[
        *(name for name in _ROW_ARRAYS if name != "piece_row_ptr"),
        "kept_ptr",
    ]
)
def _windows_kernel(
    x_ptr, x_stride, state_ptr, slot_ptr, start_ptr, piece_ptr, target_ptr, row_piece_ptr,
    kept_ptr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row, block = tl.program_id(0), tl.program_id(1)
    piece, last_piece = tl.load(row_piece_ptr + row), tl.load(row_piece_ptr + row + 1)
    row_first, row_end = tl.load(piece_ptr + piece), tl.load(piece_ptr + last_piece)
    if row_end == row_first:
        return
    slot = tl.load(slot_ptr + row)
    is_first = tl.load(start_ptr + row) == 0
    for number in range(piece, last_piece):
        target = tl.load(target_ptr + number)
        if target >= 0:
            store_window(
                x_ptr, x_stride, state_ptr, slot, target, row_first,
                tl.load(piece_ptr + number + 1), is_first, block, CHANNELS, TAPS, BLOCK, False,
            )  # fmt: skip
    if tl.load(kept_ptr + row) >= 0:
        store_window(
            x_ptr, x_stride, state_ptr, slot, slot, row_first, row_end, is_first, block,
            CHANNELS, TAPS, BLOCK, True,
        )  # fmt: skip


@triton.jit
def store_window(
    x_ptr, x_stride, conv_ptr, slot, target, row_first, end, is_first, part,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SHARE: tl.constexpr, IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr = 64, BLOCK_TAPS: tl.constexpr = 4,
):  # fmt: skip
    """Stores the last inputs of the convolution before token `end` to state `target`, for SHARE
    channels starting with `part` * SHARE. Inputs before the row's first token are in the state of
    `slot`, which is `target` if IN_PLACE."""
    tl.static_assert(TAPS - 1 <= BLOCK_TAPS)
    tap = tl.arange(0, BLOCK_TAPS)[:, None]
    index = (end - row_first) + tap - (TAPS - 1)
    for start in tl.static_range(0, SHARE, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        channel = part * SHARE + column
        inside = (tap < TAPS - 1) & (column < SHARE) & (channel < CHANNELS)
        new = x_ptr + (row_first + index) * x_stride + channel
        x = tl.load(new, mask=inside & (index >= 0), other=0.0)
        old = conv_ptr + (slot * (TAPS - 1) + index + TAPS - 1) * CHANNELS + channel
        x += tl.load(old, mask=inside & (index < 0) & (is_first == 0), other=0.0)
        if IN_PLACE:  # another thread may store what this one loads
            tl.debug_barrier()
        tl.store(conv_ptr + (target * (TAPS - 1) + tap) * CHANNELS + channel, x, mask=inside)
