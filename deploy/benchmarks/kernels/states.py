"""Linear attention, selective scans and short convolutions for benchmark `kernels`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels import (
    KimiDeltaLayer,
    KimiGates,
    ScanLayer,
    kimi_delta_attention,
    selective_scan,
    short_convolution,
)
from kernels.gated_delta_rule import DeltaLayer, gated_delta_net
from kernels.states import PIECE, StateCache, StateRows


def gated_delta_step(
    num_rows: int,
    length: int,
    *,
    num_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Callable[[], object], float]:
    """A gated-delta-rule step with two value heads per key head, and its minimum number of bytes.

    Args:
        num_rows: rows in the step, each with a state.
        length: tokens per row.
        num_heads: number of value heads.
        head_dim: dimension of keys and values.
        device: device of all tensors.
        dtype: data type of projections and weights.
    """
    rows, num_tokens = _rows(num_rows, length, device), num_rows * length
    layer = DeltaLayer(
        conv=torch.randn(4, 2 * num_heads * head_dim, device=device).to(dtype),
        log_rate=torch.zeros(num_heads, device=device),
        step_bias=torch.zeros(num_heads, device=device),
        norm=torch.ones(head_dim, device=device, dtype=dtype),
        eps=1e-6,
        num_key_heads=num_heads // 2,
        key_dim=head_dim,
    )
    cache = StateCache(
        planes=(
            torch.randn(num_rows, 3, layer.conv.shape[1], device=device).to(dtype),
            torch.zeros(num_rows, num_heads, head_dim, head_dim, device=device),
        )
    )
    x = torch.randn(num_tokens, sum(layer.widths), device=device).to(dtype)
    states = 2 * (cache.recurrent.nbytes + cache.conv.nbytes)
    outputs = num_tokens * num_heads * head_dim * dtype.itemsize
    return (
        lambda: gated_delta_net(x, layer, cache, rows, by_position=False),
        float(states + x.nbytes + outputs),
    )


def kimi_delta_step(
    num_rows: int,
    length: int,
    *,
    num_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Callable[[], object], float]:
    """A step of Kimi Delta Attention, and its minimum number of bytes; arguments as in
    `gated_delta_step`."""
    rows, num_tokens, width = (
        _rows(num_rows, length, device),
        num_rows * length,
        num_heads * head_dim,
    )
    layer = KimiDeltaLayer(
        log_rate=torch.zeros(num_heads, device=device),
        step_bias=torch.zeros(width, device=device),
        norm=torch.ones(head_dim, device=device),
        eps=1e-6,
    )
    states = torch.zeros(num_rows, num_heads, head_dim, head_dim, device=device)
    x = torch.randn(num_tokens, 3 * width, device=device).to(dtype)
    gates = KimiGates(
        *(
            torch.randn(num_tokens, size, device=device).to(dtype)
            for size in (width, num_heads, width)
        )
    )
    inputs = x.nbytes + sum(gate.nbytes for gate in gates)
    return (
        lambda: kimi_delta_attention(x, gates, layer, states, rows, by_position=False),
        float(2 * states.nbytes + inputs + num_tokens * width * dtype.itemsize),
    )


def short_convolution_step(
    num_rows: int,
    length: int,
    *,
    num_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Callable[[], object], float]:
    """A step of a short convolution over 4 inputs in the channels of all heads, and its minimum
    number of bytes; arguments as in `gated_delta_step`."""
    rows, channels = _rows(num_rows, length, device), num_heads * head_dim
    x = torch.randn(num_rows * length, channels, device=device).to(dtype)
    weight = torch.randn(4, channels, device=device).to(dtype)
    states = torch.zeros(num_rows, 3, channels, device=device, dtype=dtype)
    return (
        lambda: short_convolution(x, weight, None, states, rows, has_silu=True),
        float(2 * x.nbytes + 2 * states.nbytes),
    )


def selective_scan_step(
    num_rows: int,
    length: int,
    *,
    num_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Callable[[], object], float]:
    """A step of a selective scan with one group and a state of `head_dim` x `head_dim` per head,
    and its minimum number of bytes; arguments as in `gated_delta_step`."""
    rows = _rows(num_rows, length, device)
    zeros = torch.zeros(num_heads, device=device)
    layer = ScanLayer(
        log_rate=zeros,
        step_bias=zeros,
        skip=zeros,
        num_groups=1,
        head_dim=head_dim,
        state_dim=head_dim,
    )
    x = torch.randn(num_rows * length, sum(layer.widths), device=device).to(dtype)
    steps = torch.randn(len(x), num_heads, device=device).to(dtype)
    states = torch.zeros(num_rows, num_heads, head_dim, head_dim, device=device)
    outputs = len(x) * num_heads * head_dim * dtype.itemsize
    return (
        lambda: selective_scan(x, steps, layer, states, rows, by_position=False),
        float(2 * states.nbytes + x.nbytes + steps.nbytes + outputs),
    )


STATE_STEPS = {
    "kimi_delta_attention": kimi_delta_step,
    "selective_scan": selective_scan_step,
    "short_convolution": short_convolution_step,
}
"""Functions that create steps of Kimi Delta Attention, a selective scan (Mamba-2) or a short
convolution, keyed by op."""


def _rows(num_rows: int, length: int, device: torch.device) -> StateRows:
    """Rows of equal length, each of which continues from a state."""
    num_pieces = -(-length // PIECE)
    pieces = torch.arange(num_rows * num_pieces)
    first = pieces // num_pieces * length + pieces % num_pieces * PIECE
    return StateRows(
        slots=torch.arange(num_rows, device=device),
        starts=torch.full((num_rows,), PIECE, device=device),
        piece_starts=torch.cat((first, torch.tensor([num_rows * length]))).to(device),
        piece_rows=(pieces // num_pieces).to(device),
        piece_targets=torch.full_like(pieces, -1).to(device),
        row_pieces=(torch.arange(num_rows + 1) * num_pieces).to(device),
        num_decodes=num_rows if length == 1 else 0,
        longest=length,
    )
