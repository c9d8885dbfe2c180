"""All that stands between a layer's fused projection and its attention, in one launch on CUDA."""

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
) -> torch.Tensor:
    """Normalise, rotate and scale heads, write keys and values into the cache, return the queries.

    Each step rounds to the type of q, as norm, rotation and store one after another do. A head's
    bits do not depend on the others.

    Args:
        q: [T, Hq, D]; may be overwritten by the result. It and k and v may be strided views whose
            last dimension is contiguous.
        k: [T, Hkv, D]; what is in it afterwards is of no use.
        v: [T, Hkv, D].
        caches: keys and values [num_pages, page_size, Hkv, D], contiguous.
        slot_mapping: [T] int64, page * page_size + offset. Real tokens have distinct slots; several
            padding rows may share a slot of the dummy page, where any of them may win.
        positions: [T] int64.
        cos_sin_cache: fp32 [positions, R], cosines in the first half of a row, sines in the second:
            the two halves of a head's first R elements rotate against each other (NeoX layout).
            None where nothing rotates.
        norms: of the heads; None where there are none.
        query_scale: fp32 [positions], factors of the queries by their positions; None for 1.
    """
    run = _QK_NORM_ROPE_STORE.select(q)
    return run(q, k, v, caches, slot_mapping, positions, cos_sin_cache, norms, query_scale)


__all__ = ["HeadNorms", "qk_norm_rope_store"]
