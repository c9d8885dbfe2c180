"""Selective scan of Mamba-2 (arXiv 2405.21060): a recurrent state [N, P] per head.

For each position, with input x, step size dt, and B and C of the head's group:

    dt = softplus(dt + dt_bias);  S = S * exp(-exp(A_log) dt) + B (dt x)^T;  y = S^T C + D x

On CUDA, a step takes one launch, which reads and writes each state once and advances position by
position.
"""

from __future__ import annotations

from kernels.selective_scan.base import ScanLayer
from kernels.selective_scan.reference import selective_scan

__all__ = ["ScanLayer", "selective_scan"]
