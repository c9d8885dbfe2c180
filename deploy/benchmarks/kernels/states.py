"""Inputs of linear attention for benchmark `kernels`."""

from __future__ import annotations

from collections.abc import Callable

import torch

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
    """A step of a layer with two value heads per key head, and the bytes that it needs at least.

    Args:
        num_rows: rows of the step, each with a state.
        length: tokens of each row.
        num_heads: number of value heads.
        head_dim: size of keys and values.
        device: device of all tensors.
        dtype: data type of projections and weights.
    """
    num_pieces, num_tokens = -(-length // PIECE), num_rows * length
    pieces = torch.arange(num_rows * num_pieces)
    first = pieces // num_pieces * length + pieces % num_pieces * PIECE
    rows = StateRows(
        slots=torch.arange(num_rows, device=device),
        starts=torch.full((num_rows,), PIECE, device=device),
        piece_starts=torch.cat((first, torch.tensor([num_tokens]))).to(device),
        piece_rows=(pieces // num_pieces).to(device),
        piece_targets=torch.full_like(pieces, -1).to(device),
        row_pieces=(torch.arange(num_rows + 1) * num_pieces).to(device),
        num_decodes=num_rows if length == 1 else 0,
        longest=length,
    )
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
