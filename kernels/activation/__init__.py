"""Activations of ungated MLPs, fused into one launch on CUDA."""

from __future__ import annotations

import torch

from kernels.registry import op


@op
def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Squared ReLU of x [T, I], in the dtype of x."""
    return torch.relu(x).square()  # rounds once, since the ReLU itself is exact


@op
def xielu(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """xIELU (arXiv 2411.13010): p x² + b x for positive elements, and
    n (exp(min(x, e)) - 1 - x) + b x for all others; computed in fp32, rounded to the dtype of x.

    Args:
        x: [T, I]: inputs.
        numbers: fp32 [4]: the parameters p, n, b and e.
    """
    positive, negative, slope, limit = numbers.unbind()
    wide = x.float()
    falling = negative * (torch.expm1(torch.minimum(wide, limit)) - wide)
    curve = torch.where(wide > 0, positive * wide.square(), falling)
    return (curve + slope * wide).to(x.dtype)


__all__ = ["squared_relu", "xielu"]
