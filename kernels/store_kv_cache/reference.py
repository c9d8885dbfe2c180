"""Torch KV store."""

from __future__ import annotations

import torch


def store_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """One indexed copy for the keys and one for the values."""
    width = k.shape[1] * k.shape[2]
    k_cache.view(-1, width).index_copy_(0, slot_mapping, k.reshape(-1, width))
    v_cache.view(-1, width).index_copy_(0, slot_mapping, v.reshape(-1, width))
