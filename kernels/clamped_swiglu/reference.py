"""Torch clamped SwiGLU. Its `exp` evaluates every element alike, where torch's sigmoid may not."""

from __future__ import annotations

import torch


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """(u + 1) * g / (1 + exp(-alpha * g))."""
    half = x.shape[-1] // 2
    wide = x if x.dtype == torch.float32 else x.float()
    gate, up = wide[:, :half].clamp(max=limit), wide[:, half:].clamp(-limit, limit)
    decay = (gate * -alpha).exp_().add_(1.0)
    return gate.div_(decay).mul_(up.add_(1.0)).to(x.dtype)
