"""Scatter new keys and values into their slots of the paged cache."""

from __future__ import annotations

import torch

from kernels.registry import registry
from kernels.store_kv_cache import reference

_STORE = registry.register(
    "store_kv_cache",
    reference.store_kv_cache,
    triton="kernels.store_kv_cache.triton_kernel:store_kv_cache",
)


def store_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write k, v [T, Hkv, D] to slots `slot_mapping` [T] (int64: page * page_size + offset).

    The caches are [num_pages, page_size, Hkv, D], contiguous. k and v may be strided views whose
    heads lie side by side. Real tokens have distinct slots; several padding rows may share a slot
    of the dummy page, where any of them may win.
    """
    _STORE.select(k)(k, v, k_cache, v_cache, slot_mapping)


__all__ = ["store_kv_cache"]
