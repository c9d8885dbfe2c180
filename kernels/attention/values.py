"""Values whose size differs from that of keys: latents, whose values are part of the keys, and
values narrower than keys."""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def has_latents(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether the values of a cache are a view of its keys' leading dimensions."""
    return v_cache.shape[3] != k_cache.shape[3] and v_cache.stride(1) == k_cache.stride(1)


def widened(v: torch.Tensor, size: int) -> torch.Tensor:
    """Values [..., Dv], zero-padded to `size` dimensions, since torch's flash kernel needs values
    as wide as keys."""
    missing = size - v.shape[-1]
    return pad(v, (0, missing)) if missing else v
