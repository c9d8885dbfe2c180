"""Selective scan of Mamba-2 (arXiv 2405.21060): a recurrent state [N, P] per head.

For each position, with input x, step size dt, and B and C of the head's group:

    dt = softplus(dt + dt_bias);  S = S * exp(-exp(A_log) dt) + B (dt x)^T;  y = S^T C + D x

On CUDA, a step takes one launch, which reads and writes each state once and advances position by
position.
"""

from __future__ import annotations

import torch

from kernels.registry import registry
from kernels.selective_scan import reference
from kernels.selective_scan.base import ScanLayer
from kernels.states import StateRows

_SELECTIVE_SCAN = registry.register(
    "selective_scan",
    reference.selective_scan,
    triton="kernels.selective_scan.triton_kernel:selective_scan",
)


def selective_scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    layer: ScanLayer,
    states: torch.Tensor,
    rows: StateRows,
    *,
    by_position: bool,
) -> torch.Tensor:
    """Scans the tokens of all rows, computed in fp32; updates and stores the rows' states.

    Args:
        x: [T, H * P + 2 * G * N], contiguous: inputs, B and C (`ScanLayer.widths`).
        steps: [T, H], rows may be strided: step sizes before bias and softplus.
        layer: weights.
        states: fp32 [states, H, N, P]: recurrent states of requests.
        rows: slots, pieces and snapshots of the rows.
        by_position: whether to advance by single positions, so that the result does not depend, in
            any bit, on other rows or on how a prompt is split into chunks.

    Returns:
        [T, H * P] in the type of x.
    """
    return _SELECTIVE_SCAN.select(x)(x, steps, layer, states, rows, by_position)


__all__ = ["ScanLayer", "selective_scan"]
