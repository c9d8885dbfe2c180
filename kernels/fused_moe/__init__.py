"""Gated MLPs of several experts, of which each token takes a few."""

from __future__ import annotations

import torch

from kernels.fused_moe import reference
from kernels.registry import registry

_FUSED_MOE = registry.register(
    "fused_moe",
    reference.fused_moe,
    triton="kernels.fused_moe.triton_kernel:fused_moe",
)


def fused_moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Sum over each token's experts of weight * down(silu(gate(x)) * up(x)).

    Args:
        x: [T, H].
        gate_up: [E, 2 * I, H]; the gates' rows come first.
        down: [E, H, I].
        expert_ids: [T, K] int64, an expert at most once per token.
        weights: [T, K] fp32.

    Returns:
        [T, H] in the type of `x`; a token's bits do not depend on the others.
    """
    return _FUSED_MOE.select(x)(x, gate_up, down, expert_ids, weights)


__all__ = ["fused_moe"]
