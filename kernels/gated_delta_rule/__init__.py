"""The gated delta rule of linear attention: a state per head, by which positions know those before.

For each position, with key k, value v, query q, decay g <= 0 and share b:

    S = S * exp(g);  S = S + k (b * (v - S^T k))^T;  o = S^T q

In torch on every device. Rows of one position are a step each, longer ones go by chunks.
"""

from __future__ import annotations

from kernels.gated_delta_rule.reference import (
    DeltaInputs,
    causal_convolution,
    gated_delta_chunks,
    gated_delta_steps,
)

__all__ = ["DeltaInputs", "causal_convolution", "gated_delta_chunks", "gated_delta_steps"]
