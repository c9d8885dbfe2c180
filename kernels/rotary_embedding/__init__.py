"""Rotary position embedding, NeoX layout (the two halves of a head rotate against each other)."""

from __future__ import annotations

import torch

from kernels.registry import registry
from kernels.rotary_embedding import reference

_ROTARY = registry.register(
    "rotary_embedding",
    reference.rotary_embedding,
    triton="kernels.rotary_embedding.triton_kernel:rotary_embedding",
)


def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> None:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place by their positions [T] (int64).

    `cos_sin_cache` is [max_pos, rot_dim] fp32: cosines in the first half of a row, sines in the
    second. Only the first `rot_dim` elements of a head rotate. q and k may be strided views (slices
    of one fused projection) whose last dimension is contiguous.
    """
    _ROTARY.select(q)(q, k, positions, cos_sin_cache)


__all__ = ["rotary_embedding"]
