"""Preparation of latent attention (MLA): rotary embedding of queries, norm and store of latents, in
one launch on CUDA."""

from __future__ import annotations

import torch

from kernels.prepare_latents import reference
from kernels.prepare_latents.base import LatentRows
from kernels.registry import registry

_PREPARE = registry.register(
    "prepare_latents",
    reference.prepare_latents,
    triton="kernels.prepare_latents.triton_kernel:prepare_latents",
)


def prepare_latents(
    q: torch.Tensor,
    queries: torch.Tensor,
    rows: LatentRows,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    query_scale: torch.Tensor | None = None,
    cache_scale: float = 1.0,
) -> None:
    """Applies rotary embedding and factors to queries; normalises latents, applies rotary embedding
    to the shared part of the keys, and writes both to the cache.

    Each operation rounds to the type of q, as in `qk_norm_rope_store`. A token's result does not
    depend, in any bit, on other tokens.

    Args:
        q: [T, H, P + R], with rotary embedding of the last R dimensions; rows may be strided. The
            first P are scaled in place; the others are undefined afterwards.
        queries: [T, H, V + R], contiguous; the last R dimensions of each head are written.
        rows: latents and rotary parts of the tokens' keys.
        cache: [num_pages, page_size, 1, V + R], contiguous, in the type of q or in FP8 (e4m3).
        slot_mapping: int64 [T], as in `qk_norm_rope_store`.
        positions: int64 [T].
        cos_sin_cache: fp32 [positions, R], as in `qk_norm_rope_store`.
        query_scale: fp32 [positions]: factors of queries by position; None for no factors.
        cache_scale: scale of an FP8 cache, as in `qk_norm_rope_store`.
    """
    run = _PREPARE.select(q)
    run(q, queries, rows, cache, slot_mapping, positions, cos_sin_cache, query_scale, cache_scale)


__all__ = ["LatentRows", "prepare_latents"]
