"""Gated delta rule of linear attention (arXiv 2412.06464): a recurrent state per head.

For each position, with key k, value v, query q, log decay g <= 0 and step size b (beta):

    S = S * exp(g);  S = S + k (b * (v - S^T k))^T;  o = S^T q

Each head has one decay, or one per dimension of its keys (Kimi Delta Attention; see
`kernels/kimi_delta_attention`).

`gated_delta_net` computes a whole layer except for its projections. On CUDA, a step whose rows have
few tokens takes three launches, which read and write each state once. Longer rows are computed in
chunks by matmuls, which takes two more launches.
"""

from __future__ import annotations

from kernels.gated_delta_rule.base import DeltaInputs, DeltaLayer
from kernels.gated_delta_rule.reference import (
    causal_convolution,
    gated_delta_chunks,
    gated_delta_net,
    gated_delta_steps,
    unit_length,
)

__all__ = [
    "DeltaInputs",
    "DeltaLayer",
    "causal_convolution",
    "gated_delta_chunks",
    "gated_delta_net",
    "gated_delta_steps",
    "unit_length",
]
