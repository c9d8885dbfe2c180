"""The middle of a gated MLP: a function of the gate half times the up half."""

from __future__ import annotations

import torch

from kernels.gate_and_mul import reference
from kernels.registry import registry

_SILU_AND_MUL = registry.register(
    "silu_and_mul",
    reference.silu_and_mul,
    triton="kernels.gate_and_mul.triton_kernel:silu_and_mul",
)
_GELU_AND_MUL = registry.register(
    "gelu_and_mul",
    reference.gelu_and_mul,
    triton="kernels.gate_and_mul.triton_kernel:gelu_and_mul",
)
_CLAMPED_SWIGLU = registry.register(
    "clamped_swiglu",
    reference.clamped_swiglu,
    triton="kernels.gate_and_mul.triton_kernel:clamped_swiglu",
)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Map [T, 2 * I] to silu(x[:, :I]) * x[:, I:], computed in fp32, rounded to x.dtype."""
    return _SILU_AND_MUL.select(x)(x)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Map [T, 2 * I] to gelu(x[:, :I]) * x[:, I:], computed in fp32, rounded to x.dtype. GELU is
    its approximation with tanh, as Gemma gates."""
    return _GELU_AND_MUL.select(x)(x)


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Map [T, 2 * I] to (u + 1) * g * sigmoid(alpha * g), computed in fp32, rounded to x.dtype: as
    gpt-oss gates.

    g is the first half, at most `limit`; u is the second, within `limit` of 0.
    """
    return _CLAMPED_SWIGLU.select(x)(x, alpha, limit)


__all__ = ["clamped_swiglu", "gelu_and_mul", "silu_and_mul"]
