"""Fused residual addition and norms between blocks of a layer: a block's output is added to the
residual, and the next blocks read norms of the sum. One launch on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.fused_add_norm.base import MOST_NORMS, Norm, check_norms
from kernels.quantize_fp8 import Fp8Rows, quantize_fp8
from kernels.registry import op
from kernels.rms_norm import rms_norm


@op
def fused_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norms: Sequence[Norm],
    eps: float,
    *,
    x_weight: torch.Tensor | None = None,
    residual_weight: torch.Tensor | None = None,
    x_scale: float = 1.0,
    total_scale: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Norms of x + residual, and the sum. Inputs are not modified.

    Each operation rounds to the dtype of x; norms are computed in fp32. A row's result is bitwise
    independent of other rows.

    Args:
        x: [T, H]: a block's output.
        residual: [T, H]; if None, the sum is x itself.
        norms: norms of the sum, at most `MOST_NORMS`, all RMSNorms or all LayerNorms; one with a
            bias must be the only one.
        eps: added to mean squares or variances.
        x_weight: [H]: weight of an RMSNorm applied to x before it is added; None if there is none.
        residual_weight: [H]: weight of an RMSNorm applied to the residual before it is added; None
            if there is none.
        x_scale: factor by which x is multiplied before it is added.
        total_scale: [1]: factor by which the returned sum is multiplied, but not the input of the
            norms; None if it is 1.
    """
    check_norms(residual, norms, x_weight, total_scale)
    total = x if x_weight is None else rms_norm(x, x_weight, eps)
    if x_scale != 1.0:
        total = total * x_scale
    if residual is not None:
        total = total + (
            residual if residual_weight is None else rms_norm(residual, residual_weight, eps)
        )
    normed = tuple(_normalised(total, norm, eps) for norm in norms)
    return normed, total if total_scale is None else total * total_scale


@op
def fused_add_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    eps: float,
    *,
    by_block: bool,
    x_weight: torch.Tensor | None = None,
    x_scale: float = 1.0,
) -> tuple[Fp8Rows, torch.Tensor]:
    """The norm of x + residual, quantized as by `quantize_fp8`, and the sum; see `fused_add_norm`.

    Args:
        x: [T, H]: a block's output.
        residual: [T, H]; if None, the sum is x itself.
        norm: norm of the sum.
        eps: added to the mean square, or the variance.
        by_block: whether each block of 128 features has a scale, rather than each row.
        x_weight: [H]: weight of an RMSNorm applied to x before it is added; None if there is none.
        x_scale: factor by which x is multiplied before it is added.
    """
    (normed,), total = fused_add_norm(x, residual, (norm,), eps, x_weight=x_weight, x_scale=x_scale)
    return quantize_fp8(normed, by_block=by_block), total


def _normalised(x: torch.Tensor, norm: Norm, eps: float) -> torch.Tensor:
    if norm.subtracts_mean:
        bias = None if norm.bias is None else norm.bias.float()
        normed = torch.nn.functional.layer_norm(
            x.float(), x.shape[-1:], norm.weight.float(), bias, eps
        ).to(x.dtype)
    else:
        normed = rms_norm(x, norm.weight, eps)
    return normed.float() if norm.is_fp32 else normed


__all__ = ["MOST_NORMS", "Norm", "fused_add_norm", "fused_add_norm_fp8"]
