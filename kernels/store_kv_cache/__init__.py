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
_STORE_LATENTS = registry.register(
    "store_latents",
    reference.store_latents,
    triton="kernels.store_kv_cache.triton_kernel:store_latents",
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


def store_latents(
    latents: torch.Tensor, rotating: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write latents [T, V] and, behind them, what rotates [T, R] to slots `slot_mapping` [T].

    The cache is [num_pages, page_size, 1, V + R], contiguous. Rows may be strided; slots are those
    of `store_kv_cache`.
    """
    _STORE_LATENTS.select(latents)(latents, rotating, cache, slot_mapping)


__all__ = ["store_kv_cache", "store_latents"]
