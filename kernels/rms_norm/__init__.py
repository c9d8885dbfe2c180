"""RMSNorm of rows, or of heads."""

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
    """Normalise the last dimension of `x` ([T, H] or [T, N, D]) and scale it by `weight`.

    The mean square is taken in fp32; the output has the dtype of `x`. The last dimension must be
    contiguous, the others may be strided (a slice of a fused projection).
    """
    return _RMS_NORM.select(x)(x, weight, eps)


def rms_norm_pair(
    first: torch.Tensor,
    second: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of [T, N] and of [T, M], whose rows may be strided, each by its own weight, in one
    launch on CUDA: queries and keys that are normalised over all heads together."""
    return _RMS_NORM_PAIR.select(first)(first, second, weights, eps)


__all__ = ["rms_norm", "rms_norm_pair"]
