"""Gated activations of MLPs: a function of the gate half times the up half."""

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
    """Maps [T, 2 * I] to silu(x[:, :I]) * x[:, I:], computed in fp32, rounded to the type of x."""
    return _SILU_AND_MUL.select(x)(x)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Maps [T, 2 * I] to gelu(x[:, :I]) * x[:, I:], computed in fp32, rounded to the type of x,
    with the tanh approximation of GELU, as in Gemma."""
    return _GELU_AND_MUL.select(x)(x)


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Maps [T, 2 * I] to (u + 1) * g * sigmoid(alpha * g), computed in fp32, rounded to the type of
    x, as in gpt-oss.

    g is the first half, clamped to at most `limit`; u is the second, clamped to [-limit, limit].
    """
    return _CLAMPED_SWIGLU.select(x)(x, alpha, limit)


__all__ = ["clamped_swiglu", "gelu_and_mul", "silu_and_mul"]
