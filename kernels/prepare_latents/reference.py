"""Torch reference of the preparation of latent attention: one operation after another."""

from __future__ import annotations

import torch

from kernels.prepare_latents.base import LatentRows
from kernels.qk_norm_rope_store.reference import rotary_embedding, write_cells
from kernels.rms_norm.reference import rms_norm


def prepare_latents(
    q: torch.Tensor,
    queries: torch.Tensor,
    rows: LatentRows,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    query_scale: torch.Tensor | None,
    cache_scale: float,
) -> None:
    """Applies rotary embedding in place, and copies the results."""
    value_dim, rotary_dim = rows.latents.shape[1], rows.rotating.shape[1]
    rotating_q = q[..., -rotary_dim:]
    rotary_embedding(rotating_q, rows.rotating.unsqueeze(1), positions, cos_sin_cache)
    if query_scale is not None:
        q *= query_scale[positions].to(q.dtype)[:, None, None]
    queries[..., value_dim:] = rotating_q
    cells = cache.view(-1, value_dim + rotary_dim)
    latents = rms_norm(rows.latents, rows.weight, rows.eps)
    write_cells(cells[:, :value_dim], slot_mapping, latents, cache_scale)
    write_cells(cells[:, value_dim:], slot_mapping, rows.rotating, cache_scale)
