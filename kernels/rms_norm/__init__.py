"""RMSNorm over rows, or over heads."""

from __future__ import annotations

import torch

from kernels.registry import registry
from kernels.rms_norm import reference

_RMS_NORM = registry.register(
    "rms_norm", reference.rms_norm, triton="kernels.rms_norm.triton_kernel:rms_norm"
)

_RMS_NORM_PAIR = registry.register(
    "rms_norm_pair",
    reference.rms_norm_pair,
    triton="kernels.rms_norm.triton_kernel:rms_norm_pair",
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises the last dimension of `x` ([T, H] or [T, N, D]) and multiplies it by `weight`.

    The mean square is computed in fp32; the output has the type of `x`. The last dimension must be
    contiguous, others may be strided (a slice of a fused projection).
    """
    return _RMS_NORM.select(x)(x, weight, eps)


def rms_norm_pair(
    first: torch.Tensor,
    second: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of [T, N] and of [T, M] with two weights, in one launch on CUDA: for QK norm over
    all heads together. Rows may be strided."""
    return _RMS_NORM_PAIR.select(first)(first, second, weights, eps)


__all__ = ["rms_norm", "rms_norm_pair"]
