"""(up + 1) * gate * sigmoid(alpha * gate), where both are clamped before: as gpt-oss gates."""

from __future__ import annotations

import torch

from kernels.clamped_swiglu import reference
from kernels.registry import registry

_CLAMPED_SWIGLU = registry.register(
    "clamped_swiglu",
    reference.clamped_swiglu,
    triton="kernels.clamped_swiglu.triton_kernel:clamped_swiglu",
)


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Map [T, 2 * I] to (u + 1) * g * sigmoid(alpha * g), computed in fp32, rounded to x.dtype.

    g is the first half, at most `limit`; u is the second, within `limit` of 0.
    """
    return _CLAMPED_SWIGLU.select(x)(x, alpha, limit)


__all__ = ["clamped_swiglu"]
