"""Torch reference of the fused addition and norms: one operation after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.fused_add_norm.base import Norm
from kernels.rms_norm.reference import rms_norm


def fused_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norms: Sequence[Norm],
    eps: float,
    x_weight: torch.Tensor | None,
    residual_weight: torch.Tensor | None,
    x_scale: float,
    total_scale: torch.Tensor | None,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Adds and normalises; each operation is elementwise or over single rows, so rows do not depend
    on others."""
    total = x if x_weight is None else rms_norm(x, x_weight, eps)
    if x_scale != 1.0:
        total = total * x_scale
    if residual is not None:
        total = total + (
            residual if residual_weight is None else rms_norm(residual, residual_weight, eps)
        )
    normed = tuple(_normalised(total, norm, eps) for norm in norms)
    return normed, total if total_scale is None else total * total_scale


def _normalised(x: torch.Tensor, norm: Norm, eps: float) -> torch.Tensor:
    if norm.subtracts_mean:
        bias = None if norm.bias is None else norm.bias.float()
        normed = torch.nn.functional.layer_norm(
            x.float(), x.shape[-1:], norm.weight.float(), bias, eps
        ).to(x.dtype)
    else:
        normed = rms_norm(x, norm.weight, eps)
    return normed.float() if norm.is_fp32 else normed
