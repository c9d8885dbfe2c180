"""Soft caps of logits, as Gemma's: what is near 0 stays as it is, what is large ends at the cap."""

from __future__ import annotations

import torch

from kernels.registry import registry
from kernels.soft_cap import reference

_SOFT_CAP = registry.register(
    "soft_cap_", reference.soft_cap_, triton="kernels.soft_cap.triton_kernel:soft_cap_"
)


def soft_cap_(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Replaces each element x of fp32 [R, V] by cap * tanh(x / cap); returns the same tensor."""
    return _SOFT_CAP.select(logits)(logits, cap)


__all__ = ["soft_cap_"]
