"""Triton inputs of the gated delta rule: convolution, SiLU, L2 normalization and gates in one
launch, by groups of heads and runs of tokens."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.gated_delta_rule.base import LENGTH_EPS, DeltaLayer
from kernels.states import StateCache, StateRows
from kernels.tiles import cdiv, next_power_of_2

_HEADS: Final = 4
"""Heads per program, independent of the step's size, so that results are independent of it, too."""
_RUNS: Final = 4
"""Number of programs among which the tokens of a chunk are divided."""


class PreparedInputs(NamedTuple):
    """`DeltaInputs` of a step by key head, with q, k and v in the dtype of the projections."""

    qk: torch.Tensor
    """[T, 2 Hk, K]: scaled queries, then keys."""
    v: torch.Tensor
    """[T, H, V]: values."""
    gates: torch.Tensor
    """[T, 2, H] fp32: logarithms of the decay, then step sizes."""


def prepare_inputs(
    projected: torch.Tensor, layer: DeltaLayer, cache: StateCache, rows: StateRows
) -> PreparedInputs:
    """Launches a grid of (chunks, runs of tokens, blocks of heads)."""
    num_tokens, num_heads = len(projected), len(layer.log_rate)
    key_heads, key_dim, value_dim = layer.num_key_heads, layer.key_dim, len(layer.norm)
    widths = layer.widths
    inputs = PreparedInputs(
        projected.new_empty(num_tokens, 2 * key_heads, key_dim),
        projected.new_empty(num_tokens, num_heads, value_dim),
        projected.new_empty(num_tokens, 2, num_heads, dtype=torch.float32),
    )
    key_blocks = cdiv(2 * key_heads, _HEADS)
    grid = (
        len(rows.piece_rows),
        1 if rows.longest == 1 else _RUNS,
        key_blocks + cdiv(num_heads, _HEADS),
    )
    _inputs_kernel[grid](
        projected, projected.stride(0), layer.conv, cache.conv, layer.log_rate, layer.step_bias,
        *inputs, rows.slots, rows.starts, rows.piece_starts, rows.piece_rows, rows.row_pieces,
        key_dim**-0.5, LENGTH_EPS, float(layer.share_scale),
        KEY_HEADS=key_heads, HEADS=num_heads, KEY=key_dim, VALUE=value_dim,
        GATE_OFFSET=sum(widths[:4]), TAPS=len(layer.conv), KEY_BLOCKS=key_blocks,
        BLOCK_HEADS=_HEADS, BLOCK_K=next_power_of_2(key_dim), BLOCK_V=next_power_of_2(value_dim),
        BLOCK_ALL=next_power_of_2(num_heads),
    )  # fmt: skip
    return inputs


_ROW_ARRAYS = ["slot_ptr", "start_ptr", "piece_ptr", "piece_row_ptr", "row_piece_ptr"]
"""Names of the arguments that point into the step's staged inputs. Their alignment varies; kernels
are not specialized on it, so that one binary serves all."""


@dependent_kernel(do_not_specialize_on_alignment=_ROW_ARRAYS)
def _inputs_kernel(
    x_ptr, x_stride, weight_ptr, conv_ptr, rate_ptr, bias_ptr, qk_ptr, v_ptr, gate_ptr,
    slot_ptr, start_ptr, piece_ptr, piece_row_ptr, row_piece_ptr, scale, length_eps,
    share_scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    GATE_OFFSET: tl.constexpr, TAPS: tl.constexpr, KEY_BLOCKS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    piece, block = tl.program_id(0), tl.program_id(2)
    row = tl.load(piece_row_ptr + piece)
    row_first = tl.load(piece_ptr + tl.load(row_piece_ptr + row))
    state_ptr = conv_ptr + tl.load(slot_ptr + row) * (TAPS - 1) * (
        2 * KEY_HEADS * KEY + HEADS * VALUE
    )
    is_first = tl.load(start_ptr + row) == 0
    first = tl.load(piece_ptr + piece) + tl.program_id(1)
    for token in range(first, tl.load(piece_ptr + piece + 1), tl.num_programs(1)):
        if block < KEY_BLOCKS:
            head = (block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
            column = tl.arange(0, BLOCK_K)[None, :]
            inside = (head < 2 * KEY_HEADS) & (column < KEY)
            channel = head * KEY + column
            x = _convolve(
                x_ptr, x_stride, weight_ptr, state_ptr, channel, inside, token, row_first, is_first,
                2 * KEY_HEADS * KEY + HEADS * VALUE, TAPS,
            )  # fmt: skip
            length = tl.sqrt(tl.sum(x * x, axis=1) + length_eps)[:, None]
            x = x * tl.where(head < KEY_HEADS, scale / length, 1.0 / length)
            target = qk_ptr + token * (2 * KEY_HEADS * KEY) + channel
            tl.store(target, x.to(qk_ptr.dtype.element_ty), mask=inside)
        else:  # different names, since blocks may have different shapes
            value_head = ((block - KEY_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
            value = tl.arange(0, BLOCK_V)[None, :]
            in_value = (value_head < HEADS) & (value < VALUE)
            cell = value_head * VALUE + value
            v = _convolve(
                x_ptr, x_stride, weight_ptr, state_ptr, 2 * KEY_HEADS * KEY + cell, in_value,
                token, row_first, is_first, 2 * KEY_HEADS * KEY + HEADS * VALUE, TAPS,
            )  # fmt: skip
            own_values = v_ptr + token * (HEADS * VALUE) + cell
            tl.store(own_values, v.to(v_ptr.dtype.element_ty), mask=in_value)
        if block == 0:
            own = x_ptr + token * x_stride + GATE_OFFSET
            gates = gate_ptr + token * 2 * HEADS
            _store_gates(own, rate_ptr, bias_ptr, gates, share_scale, HEADS, BLOCK_ALL)


@triton.jit
def _convolve(
    x_ptr, x_stride, weight_ptr, state_ptr, channel, inside, token, row_first, is_first,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """SiLU of the convolution of channels at a token, in fp32. Inputs before the row's first token
    in this step are read from the state."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        index = token - row_first + (tap - TAPS + 1)
        new = x_ptr + (row_first + index) * x_stride + channel
        old = state_ptr + (index + TAPS - 1) * CHANNELS + channel
        x = tl.load(new, mask=inside & (index >= 0), other=0.0).to(tl.float32)
        if tap < TAPS - 1:
            is_old = inside & (index < 0) & (is_first == 0)
            x += tl.load(old, mask=is_old, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + tap * CHANNELS + channel, mask=inside, other=0.0)
        total += x * weight.to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _store_gates(
    x_ptr, rate_ptr, bias_ptr, gate_ptr, share_scale, HEADS: tl.constexpr, BLOCK_ALL: tl.constexpr
):  # fmt: skip
    """Stores step sizes, from the first projections, and decays, from the following ones."""
    head = tl.arange(0, BLOCK_ALL)
    inside = head < HEADS
    b = tl.load(x_ptr + head, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(x_ptr + HEADS + head, mask=inside, other=0.0).to(tl.float32)
    a += tl.load(bias_ptr + head, mask=inside, other=0.0)
    rate = tl.exp(tl.load(rate_ptr + head, mask=inside, other=0.0))
    # Softplus, which is linear where torch's is linear; the exponential would overflow there.
    positive = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    tl.store(gate_ptr + head, -rate * positive, mask=inside)
    tl.store(gate_ptr + HEADS + head, share_scale / (1.0 + tl.exp(-b)), mask=inside)
