"""Torch: the norms, the rotation and the store one after another."""

from __future__ import annotations

import torch

from kernels.qk_norm_rope_store.base import HeadNorms
from kernels.rms_norm.reference import rms_norm
from kernels.rotary_embedding.reference import rotary_embedding
from kernels.store_kv_cache.reference import store_kv_cache


def qk_norm_rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    norms: HeadNorms | None,
    query_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Norms and rotation of queries and keys, and the store of keys and values; in place where
    nothing is normalised."""
    if norms is not None and norms.of_values:
        v = rms_norm(v, torch.ones_like(v[0, 0]), norms.eps)
    if norms is not None and not norms.after_rotation:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    if cos_sin_cache is not None:
        rotary_embedding(q, k, positions, cos_sin_cache)
    if norms is not None and norms.after_rotation:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    store_kv_cache(k, v, *caches, slot_mapping)
    if query_scale is None:
        return q
    return q * query_scale[positions].to(q.dtype)[:, None, None]
