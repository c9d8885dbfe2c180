"""Torch reference of RMSNorm. All operations are elementwise or over single rows, so rows do not
depend on others."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Weight times the normalised row, which is rounded to the type of x before, as in Hugging Face
    transformers."""
    if x.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    x_fp32 = x.float()
    inverse_rms = x_fp32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x_fp32 * inverse_rms).to(x.dtype).mul_(weight)


def rms_norm_pair(
    first: torch.Tensor,
    second: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalises one after the other."""
    return rms_norm(first, weights[0], eps), rms_norm(second, weights[1], eps)
