"""Torch reference: expert by expert."""

from __future__ import annotations

import torch

from kernels.silu_and_mul.reference import silu_and_mul

_TILE = 16


def fused_moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """See kernels.fused_moe. Experts are added up by ascending number.

    HAZARD(invariance): products of another number of rows round differently, so each has exactly
    `_TILE` rows, the last filled up with zeros.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    counts = torch.bincount(expert_ids.flatten(), minlength=gate_up.shape[0])
    for expert in counts.nonzero().flatten().tolist():
        tokens, choices = torch.nonzero(expert_ids == expert, as_tuple=True)
        rows = x.index_select(0, tokens)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(tokens) % _TILE))
        parts = [
            silu_and_mul(tile @ gate_up[expert].T) @ down[expert].T
            for tile in padded.view(-1, _TILE, x.shape[1]).unbind()
        ]
        result = torch.cat(parts)[: len(tokens)].float()
        total.index_add_(0, tokens, result * weights[tokens, choices].unsqueeze(1))
    return total.to(x.dtype)
