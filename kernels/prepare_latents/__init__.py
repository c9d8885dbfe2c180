"""Latent attention between its projections and its products, in one launch on CUDA."""

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
) -> None:
    """Rotate and scale queries; normalise latents, rotate what stands beside them, and write both
    into the cache.

    Each step rounds to the type of q, as `qk_norm_rope_store` does. A token's bits do not depend on
    the others.

    Args:
        q: [T, H, P + R], of which the last R rotate; rows may be strided. The first P are scaled in
            place, what is in the others afterwards is of no use.
        queries: [T, H, V + R], contiguous; the last R of each head are written.
        rows: what is kept of the tokens.
        cache: [num_pages, page_size, 1, V + R], contiguous.
        slot_mapping: [T] int64, as `qk_norm_rope_store` takes it.
        positions: [T] int64.
        cos_sin_cache: [positions, R], as `qk_norm_rope_store` takes it.
        query_scale: fp32 [positions], factors of the queries by their positions; None for 1.
    """
    run = _PREPARE.select(q)
    run(q, queries, rows, cache, slot_mapping, positions, cos_sin_cache, query_scale)


__all__ = ["LatentRows", "prepare_latents"]
