"""Torch reference of gated activations."""

from __future__ import annotations

import torch

from kernels import rowwise


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up."""
    gate, up = _wide_halves(x)
    return rowwise.silu(gate).mul_(up).to(x.dtype)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes gelu(gate) * up, with GELU by tanh."""
    gate, up = _wide_halves(x)
    return rowwise.gelu_tanh(gate).mul_(up).to(x.dtype)


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Computes (u + 1) * g / (1 + exp(-alpha * g)) of the clamped halves."""
    gate, up = _wide_halves(x)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    decay = (gate * -alpha).exp_().add_(1.0)
    return gate.div_(decay).mul_(up.add_(1.0)).to(x.dtype)


def _wide_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up halves in fp32, as two strided views."""
    half = x.shape[-1] // 2
    wide = x if x.dtype == torch.float32 else x.float()
    return wide[:, :half], wide[:, half:]
