"""Soft cap of logits, as in Gemma: values near 0 hardly change, large ones approach the cap."""

from __future__ import annotations

import torch

from kernels.registry import registry
from kernels.soft_cap import reference

_SOFT_CAP = registry.register(
    "soft_cap_", reference.soft_cap_, triton="kernels.soft_cap.triton_kernel:soft_cap_"
)


def soft_cap_(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Replaces each element x of fp32 logits [R, V] by cap * tanh(x / cap), in place; returns the
    same tensor."""
    return _SOFT_CAP.select(logits)(logits, cap)


__all__ = ["soft_cap_"]
