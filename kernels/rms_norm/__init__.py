"""RMSNorm over rows, or over heads. On CPU all operations are elementwise or over single rows, so
rows do not depend on each other."""

from __future__ import annotations

import torch

from kernels.registry import op


@op
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalizes the last dimension of `x` ([T, H] or [T, N, D]) and multiplies it by `weight`.

    The mean square is computed in fp32; the output has the dtype of `x`. The last dimension must be
    contiguous; others may be strided (a slice of a fused projection).
    """
    if x.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    x_fp32 = x.float()
    inverse_rms = x_fp32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    # Rounded to the type of x before the weight, as in Hugging Face transformers.
    return (x_fp32 * inverse_rms).to(x.dtype).mul_(weight)


@op
def rms_norm_pair(
    first: torch.Tensor,
    second: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of [T, N] and of [T, M] with two weights, in one launch on CUDA, for QK norm over
    all heads together. Rows may be strided."""
    return rms_norm(first, weights[0], eps), rms_norm(second, weights[1], eps)


__all__ = ["rms_norm", "rms_norm_pair"]
