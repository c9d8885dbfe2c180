"""RMSNorm, alone or fused with the residual addition before it."""

from __future__ import annotations

import torch

from kernels.registry import registry
from kernels.rms_norm import reference

_RMS_NORM = registry.register(
    "rms_norm", reference.rms_norm, triton="kernels.rms_norm.triton_kernel:rms_norm"
)
_FUSED_ADD_RMS_NORM = registry.register(
    "fused_add_rms_norm",
    reference.fused_add_rms_norm,
    triton="kernels.rms_norm.triton_kernel:fused_add_rms_norm",
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension of `x` ([T, H] or [T, N, D]) and scale it by `weight`.

    The mean square is taken in fp32; the output has the dtype of `x`. The last dimension must be
    contiguous, the others may be strided (a slice of a fused projection).
    """
    return _RMS_NORM.select(x)(x, weight, eps)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual), both [T, H]; the inputs stay as they are."""
    return _FUSED_ADD_RMS_NORM.select(x)(x, residual, weight, eps)


__all__ = ["fused_add_rms_norm", "rms_norm"]
