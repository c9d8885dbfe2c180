"""Fused residual addition and norms between blocks of a layer: a block's output is added to the
residual, and the next blocks read norms of the sum. One launch on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.fused_add_norm import reference
from kernels.fused_add_norm.base import Norm
from kernels.registry import registry

MOST_NORMS = 3
"""Maximum norms of one sum: an MLP, a router and experts may each have a separate one."""

_FUSED_ADD_NORM = registry.register(
    "fused_add_norm",
    reference.fused_add_norm,
    triton="kernels.fused_add_norm.triton_kernel:fused_add_norm",
)


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

    Each operation rounds to the type of x; norms are computed in fp32. A row's result does not
    depend, in any bit, on other rows.

    Args:
        x: [T, H]: a block's output.
        residual: [T, H]; None for none: the sum is then x itself.
        norms: norms of the sum, at most `MOST_NORMS`, all RMSNorms or all LayerNorms; one with a
            bias must be the only one.
        eps: added to mean squares, or variances.
        x_weight: [H]: weight of an RMSNorm of x before it is added; None for no norm.
        residual_weight: [H]: weight of an RMSNorm of the residual before it is added; None for no
            norm.
        x_scale: factor of x before it is added.
        total_scale: [1]: factor of the returned sum, which norms do not see; None for 1.
    """
    assert len(norms) <= MOST_NORMS, "too many norms for the kernel"
    assert len({norm.subtracts_mean for norm in norms}) <= 1, "norms must share one statistic"
    biased = [norm for norm in norms if norm.bias is not None]
    assert not biased or len(norms) == 1, "a norm with a bias must be the only one"
    assert all(norm.subtracts_mean for norm in biased), "only LayerNorm has a bias"
    assert residual is not None or (x_weight is None and total_scale is None), "no residual"
    run = _FUSED_ADD_NORM.select(x)
    return run(x, residual, norms, eps, x_weight, residual_weight, x_scale, total_scale)


__all__ = ["MOST_NORMS", "Norm", "fused_add_norm"]
