"""Gated activations of MLPs: a function of the gate half times the up half."""

from __future__ import annotations

import torch

from kernels import rowwise
from kernels.registry import op


@op
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Maps [T, 2 * I] to silu(x[:, :I]) * x[:, I:], computed in fp32, rounded to the dtype of x."""
    gate, up = _fp32_halves(x)
    return rowwise.silu(gate).mul_(up).to(x.dtype)


@op
def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Maps [T, 2 * I] to gelu(x[:, :I]) * x[:, I:], computed in fp32, rounded to the dtype of x,
    with the tanh approximation of GELU, as in Gemma."""
    gate, up = _fp32_halves(x)
    return rowwise.gelu_tanh(gate).mul_(up).to(x.dtype)


@op
def clamped_silu_and_mul(x: torch.Tensor, limit: float) -> torch.Tensor:
    """Maps [T, 2 * I] to min(silu(x[:, :I]), limit) * u, computed in fp32, rounded to the dtype of
    x, as in Step 3.5; u is x[:, I:], clamped to [-limit, limit]."""
    gate, up = _fp32_halves(x)
    return rowwise.silu(gate).clamp_(max=limit).mul_(up.clamp(-limit, limit)).to(x.dtype)


@op
def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Maps [T, 2 * I] to (u + 1) * g * sigmoid(alpha * g), computed in fp32, rounded to the dtype
    of x, as in gpt-oss.

    g is the first half, clamped to at most `limit`; u is the second half, clamped to [-limit,
    limit].
    """
    gate, up = _fp32_halves(x)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    decay = (gate * -alpha).exp_().add_(1.0)
    return gate.div_(decay).mul_(up.add_(1.0)).to(x.dtype)


def _fp32_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up halves in fp32, as two strided views."""
    half = x.shape[-1] // 2
    wide = x if x.dtype == torch.float32 else x.float()
    return wide[:, :half], wide[:, half:]


__all__ = ["clamped_silu_and_mul", "clamped_swiglu", "gelu_and_mul", "silu_and_mul"]
