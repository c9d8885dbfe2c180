"""QK norm, rotary embedding (RoPE) and store to the KV cache, in one launch on CUDA."""

from __future__ import annotations

import torch

from kernels.qk_norm_rope_store import reference
from kernels.qk_norm_rope_store.base import HeadNorms
from kernels.registry import registry

_QK_NORM_ROPE_STORE = registry.register(
    "qk_norm_rope_store",
    reference.qk_norm_rope_store,
    triton="kernels.qk_norm_rope_store.triton_kernel:qk_norm_rope_store",
)


def qk_norm_rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
    *,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    norms: HeadNorms | None = None,
    query_scale: torch.Tensor | None = None,
    cache_scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """Applies norms, rotary embedding and factors to heads, writes keys and values to the cache,
    and returns the queries [T, Hq, D].

    Each operation rounds to the type of q, as separate operations would. A head's result does not
    depend, in any bit, on other heads or tokens.

    Args:
        q: [T, Hq, D]; may be overwritten by the result. q, k and v may be strided views whose last
            dimension is contiguous.
        k: [T, Hkv, D]; undefined afterwards.
        v: [T, Hkv, D].
        caches: keys and values [num_pages, page_size, Hkv, D], contiguous, in the type of q or in
            FP8 (e4m3).
        slot_mapping: int64 [T]: page * page_size + offset. Real tokens have distinct cells; padding
            rows may share a cell of the dummy page, with an arbitrary result.
        positions: int64 [T].
        cos_sin_cache: fp32 [positions, R]: cosines in the first half of each row, sines in the
            second, for the first R dimensions of a head in NeoX layout (two halves). None for no
            rotary embedding.
        norms: norms over each head; None for none.
        query_scale: fp32 [positions]: factors of queries by position; None for no factors.
        cache_scales: scales of keys and values in FP8 caches, which hold their quotients, clamped
            to the range of e4m3.
    """
    run = _QK_NORM_ROPE_STORE.select(q)
    return run(
        q, k, v, caches, slot_mapping, positions, cos_sin_cache, norms, query_scale, cache_scales
    )


__all__ = ["HeadNorms", "qk_norm_rope_store"]
