"""Gated delta rule of linear attention (arXiv 2412.06464): a recurrent state per head.

For each position, with key k, value v, query q, log decay g <= 0 and step size b (beta):

    S = S * exp(g);  S = S + k (b * (v - S^T k))^T;  o = S^T q

It runs in torch on every device: position by position, or longer rows in chunks.
"""

from __future__ import annotations

from kernels.gated_delta_rule.reference import (
    DeltaInputs,
    causal_convolution,
    gated_delta_chunks,
    gated_delta_steps,
)

__all__ = ["DeltaInputs", "causal_convolution", "gated_delta_chunks", "gated_delta_steps"]
