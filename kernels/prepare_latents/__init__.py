"""Preparation of latent attention (MLA): rotary embedding of queries, norm and store of latents, in
one launch on CUDA."""

from __future__ import annotations

import torch

from kernels.prepare_latents.base import LatentRows
from kernels.qk_norm_rope_store.reference import rotary_embedding, write_cells
from kernels.registry import op
from kernels.rms_norm import rms_norm


@op
def prepare_latents(
    q: torch.Tensor,
    queries: torch.Tensor | None,
    rows: LatentRows,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    query_scale: torch.Tensor | None = None,
    cache_scale: float = 1.0,
) -> None:
    """Applies rotary embedding and factors to queries; normalizes latents, applies rotary embedding
    to the shared part of the keys, and writes both to the cache.

    Each operation rounds to the dtype of q, as in `qk_norm_rope_store`. A token's result is bitwise
    independent of other tokens.

    Args:
        q: [T, H, P + R], with rotary embedding of the last R dimensions; rows may be strided. The
            first P dimensions are scaled in place. The last R are undefined afterwards if `queries`
            is given; otherwise they are rotated in place.
        queries: [T, H, V + R], contiguous; the last R dimensions of each head are written. None
            for attention in expanded form.
        rows: latents and rotary parts of the tokens' keys.
        cache: [num_pages, page_size, 1, V + R], contiguous, in the dtype of q or in FP8 (e4m3).
        slot_mapping: int64 [T], as in `qk_norm_rope_store`.
        positions: int64 [T]: positions of the tokens.
        cos_sin_cache: fp32 [positions, R], as in `qk_norm_rope_store`; None if there is no rotary
            embedding.
        query_scale: fp32 [positions]: factor for queries at each position; None if queries are not
            scaled.
        cache_scale: scale of an FP8 cache, as in `qk_norm_rope_store`.
    """
    value_dim, rotary_dim = rows.latents.shape[1], rows.rotating.shape[1]
    rotating_q = q[..., -rotary_dim:]
    if cos_sin_cache is not None:
        rotary_embedding(rotating_q, rows.rotating.unsqueeze(1), positions, cos_sin_cache)
    if query_scale is not None:
        q *= query_scale[positions].to(q.dtype)[:, None, None]
    if queries is not None:
        queries[..., value_dim:] = rotating_q
    cells = cache.view(-1, value_dim + rotary_dim)
    latents = rms_norm(rows.latents, rows.weight, rows.eps)
    write_cells(cells[:, :value_dim], slot_mapping, latents, cache_scale)
    write_cells(cells[:, value_dim:], slot_mapping, rows.rotating, cache_scale)


__all__ = ["LatentRows", "prepare_latents"]
