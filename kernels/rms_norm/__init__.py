"""RMSNorm of rows, or of heads."""

from __future__ import annotations

import torch

from kernels.registry import registry
from kernels.rms_norm import reference

_RMS_NORM = registry.register(
    "rms_norm", reference.rms_norm, triton="kernels.rms_norm.triton_kernel:rms_norm"
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension of `x` ([T, H] or [T, N, D]) and scale it by `weight`.

    The mean square is taken in fp32; the output has the dtype of `x`. The last dimension must be
    contiguous, the others may be strided (a slice of a fused projection).
    """
    return _RMS_NORM.select(x)(x, weight, eps)


__all__ = ["rms_norm"]
