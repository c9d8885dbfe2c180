"""Torch implementation of Kimi Delta Attention."""

from __future__ import annotations

import torch

from kernels import rowwise
from kernels.gated_delta_rule import (
    DeltaInputs,
    gated_delta_chunks,
    gated_delta_steps,
    unit_length,
)
from kernels.kimi_delta_attention.base import KimiDeltaLayer, KimiGates
from kernels.registry import op
from kernels.rms_norm import rms_norm
from kernels.states import StateRows, advance_rows


@op
def kimi_delta_attention(
    x: torch.Tensor,
    gates: KimiGates,
    layer: KimiDeltaLayer,
    states: torch.Tensor,
    rows: StateRows,
    *,
    by_position: bool,
) -> torch.Tensor:
    """Applies the delta rule with a decay per key dimension, in fp32, then the gated norm of its
    outputs; updates and stores the states of all rows.

    The reference computes rows with one token together, and longer ones one after another.

    Args:
        x: [T, H * (2 K + V)], contiguous: queries, keys and values of all heads, after the
            convolution.
        gates: projections of the same tokens.
        layer: weights.
        states: fp32 [states, H, K, V]; only padding rows, whose results are arbitrary, may share
            one.
        rows: slots, chunks and snapshots of the rows.
        by_position: whether to advance by single positions, so that the result is bitwise
            independent of other rows and of how a prompt is split into chunks.

    Returns:
        [T, H * V] in the dtype of x.
    """
    inputs = kimi_delta_inputs(x, gates, layer)
    out = advance_rows(
        states,
        rows,
        lambda own, state: gated_delta_steps(inputs.part(own.start, own.stop), state),
        lambda own, state: gated_delta_chunks(
            inputs.part(own.start, own.stop), state, by_position=by_position
        ),
        inputs.v.shape,
    )
    out = rms_norm(out.to(x.dtype).float(), layer.norm, layer.eps)
    return (out.flatten(1) * rowwise.sigmoid(gates.output.float())).to(x.dtype)


def kimi_delta_inputs(x: torch.Tensor, gates: KimiGates, layer: KimiDeltaLayer) -> DeltaInputs:
    """Inputs of the delta rule by head."""
    num_heads, key_dim, value_dim = len(layer.log_rate), layer.key_dim, len(layer.norm)
    keys = num_heads * key_dim
    q, k, v = x.float().split([keys, keys, num_heads * value_dim], dim=1)
    q, k = (unit_length(part.reshape(len(x), num_heads, key_dim)) for part in (q, k))
    steps = rowwise.softplus(gates.decay.float() + layer.step_bias)
    decay = -layer.log_rate.exp().unsqueeze(-1) * steps.view(len(x), num_heads, key_dim)
    share = rowwise.sigmoid(gates.share.float())
    return DeltaInputs(q * key_dim**-0.5, k, v.view(len(x), num_heads, value_dim), decay, share)
