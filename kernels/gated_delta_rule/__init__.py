"""Gated delta rule of linear attention (arXiv 2412.06464): a recurrent state per head.

For each position, with key k, value v, query q, log decay g <= 0 and step size b (beta):

    S = S * exp(g);  S = S + k (b * (v - S^T k))^T;  o = S^T q

`gated_delta_net` is all of a layer between its projections. On CUDA, a step of rows of few tokens
takes two launches, which read and write each state once; longer rows are computed in pieces by
matrix products, in three launches more.
"""

from __future__ import annotations

import torch

from kernels.gated_delta_rule import reference
from kernels.gated_delta_rule.base import DeltaInputs, DeltaLayer
from kernels.gated_delta_rule.reference import (
    causal_convolution,
    gated_delta_chunks,
    gated_delta_steps,
)
from kernels.registry import registry
from kernels.states import StateCache, StateRows

_GATED_DELTA_NET = registry.register(
    "gated_delta_net",
    reference.gated_delta_net,
    triton="kernels.gated_delta_rule.triton_backend:gated_delta_net",
)


def gated_delta_net(
    projected: torch.Tensor,
    layer: DeltaLayer,
    cache: StateCache,
    rows: StateRows,
    *,
    by_position: bool,
) -> torch.Tensor:
    """Short convolution of queries, keys and values, the delta rule, and the gated norm of its
    outputs; updates and stores the states of all rows.

    Args:
        projected: [T, W]: projections of the rows' tokens, with `DeltaLayer.widths`.
        layer: weights.
        cache: states, which may be those of several rows only if these are padding, whose results
            are arbitrary.
        rows: slots, pieces and snapshots of the rows.
        by_position: whether to advance by single positions, so that the result does not depend, in
            any bit, on other rows or on how a prompt is split into chunks.

    Returns:
        [T, H * V] in the type of `projected`.
    """
    run = _GATED_DELTA_NET.select(projected)
    return run(projected, layer, cache, rows, by_position=by_position)


__all__ = [
    "DeltaInputs",
    "DeltaLayer",
    "causal_convolution",
    "gated_delta_chunks",
    "gated_delta_net",
    "gated_delta_steps",
]
