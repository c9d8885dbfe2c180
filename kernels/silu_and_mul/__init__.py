"""SiLU of the gate half times the up half: the middle of a gated MLP."""

from __future__ import annotations

import torch

from kernels.registry import registry
from kernels.silu_and_mul import reference

_SILU_AND_MUL = registry.register(
    "silu_and_mul",
    reference.silu_and_mul,
    triton="kernels.silu_and_mul.triton_kernel:silu_and_mul",
)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Map [T, 2 * I] to silu(x[:, :I]) * x[:, I:], computed in fp32, rounded to x.dtype."""
    return _SILU_AND_MUL.select(x)(x)


__all__ = ["silu_and_mul"]
