"""Kimi Delta Attention (KDA, arXiv 2510.26692): the gated delta rule with a decay per key
dimension, and a gated norm of its outputs.

    q, k L2-normalized;  g = -exp(A_log) softplus(decay + dt_bias);  b = sigmoid(share)
    S = diag(exp(g)) S;  S = S + k (b (v - S^T k))^T;  o = norm(S^T q) sigmoid(gate)

On CUDA, a step whose rows have few tokens takes two launches, which read and write each state once.
Longer rows are computed in chunks by matmuls, which takes four more launches.
"""

from __future__ import annotations

from kernels.kimi_delta_attention.base import KimiDeltaLayer, KimiGates
from kernels.kimi_delta_attention.reference import kimi_delta_attention

__all__ = ["KimiDeltaLayer", "KimiGates", "kimi_delta_attention"]
