"""Soft cap of logits, as in Gemma: values near 0 hardly change; large values approach the cap."""

from __future__ import annotations

import torch

from kernels.registry import op


@op
def soft_cap_(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Replaces each element x of fp32 logits [R, V] with cap * tanh(x / cap), in place; returns the
    same tensor."""
    return logits.div_(cap).tanh_().mul_(cap)


__all__ = ["soft_cap_"]
