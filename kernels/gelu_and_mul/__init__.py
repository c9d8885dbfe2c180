"""GELU of the gate half, by its approximation with tanh, times the up half: as Gemma gates."""

from __future__ import annotations

import torch

from kernels.gelu_and_mul import reference
from kernels.registry import registry

_GELU_AND_MUL = registry.register(
    "gelu_and_mul",
    reference.gelu_and_mul,
    triton="kernels.gelu_and_mul.triton_kernel:gelu_and_mul",
)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Map [T, 2 * I] to gelu(x[:, :I]) * x[:, I:], computed in fp32, rounded to x.dtype."""
    return _GELU_AND_MUL.select(x)(x)


__all__ = ["gelu_and_mul"]
