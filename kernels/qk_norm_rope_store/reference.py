"""Torch reference of QK norm, rotary embedding and store: one operation after another."""

from __future__ import annotations

import torch

from kernels.qk_norm_rope_store.base import HeadNorms
from kernels.registry import op
from kernels.rms_norm import rms_norm

_FP8_MAX = 448.0
"""Largest number in e4m3."""


@op
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

    Each operation rounds to the dtype of q, as separate operations would. A head's result is
    bitwise independent of other heads or tokens.

    Args:
        q: [T, Hq, D]: queries; may be overwritten by the result. q, k and v may be strided views
            whose last dimension is contiguous.
        k: [T, Hkv, D]: keys; undefined afterwards. Without heads (Hkv = 0), nothing is stored, as
            in layers that read the cache of another layer.
        v: [T, Hkv, Dv]: values.
        caches: keys [num_pages, page_size, Hkv, D] and values [num_pages, page_size, Hkv, Dv],
            contiguous, in the dtype of q or in FP8 (e4m3).
        slot_mapping: int64 [T]: page * page_size + offset. Real tokens have distinct cells; padding
            rows may share a cell of the dummy page, with an arbitrary result.
        positions: int64 [T]: positions of the tokens.
        cos_sin_cache: fp32 [positions, R]: cosines in the first half of each row, sines in the
            second, for the first R dimensions of a head in NeoX layout (two halves). None if there
            is no rotary embedding.
        norms: norms over each head; None if unused.
        query_scale: fp32 [positions]: factor for queries at each position; None if queries are not
            scaled.
        cache_scales: scales of keys and values in FP8 caches, which hold keys and values divided by
            them, clamped to the range of e4m3.
    """
    if norms is not None and norms.of_values:
        v = rms_norm(v, torch.ones_like(v[0, 0]), norms.eps)
    if norms is not None and not norms.after_rotation:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    if cos_sin_cache is not None:
        rotary_embedding(q, k, positions, cos_sin_cache)
    if norms is not None and norms.after_rotation:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    if k.shape[1]:
        store_kv_cache(k, v, *caches, slot_mapping, cache_scales)
    if query_scale is None:
        return q
    return q * query_scale[positions].to(q.dtype)[:, None, None]


def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> None:
    """Applies rotary embedding to heads [T, Hq, D] and [T, Hkv, D] in place, at positions int64
    [T].

    Takes one pass if k directly follows q in memory. The table is as in `qk_norm_rope_store`.
    """
    cos_sin = cos_sin_cache.index_select(0, positions).unsqueeze(1)
    cos, sin = cos_sin.chunk(2, dim=-1)
    joined = _joined_heads(q, k)
    if joined is not None:
        _rotate(joined, cos, sin)
        return
    _rotate(q, cos, sin)
    _rotate(k, cos, sin)


def rotate_heads(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    """Applies rotary embedding to heads [T, H, D] in place; other arguments as in
    `rotary_embedding`."""
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    _rotate(x, cos, sin)


def _joined_heads(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """The heads of q and k as one view [T, Hq + Hkv, D], if they are adjacent in the output of a
    fused projection; otherwise None."""
    tokens, num_q_heads, head_dim = q.shape
    follows = (
        q.dtype == k.dtype
        and (tokens == 1 or q.stride(0) == k.stride(0))
        and q.stride()[1:] == k.stride()[1:]
        and q.stride(1) == head_dim
        and k.data_ptr() == q.data_ptr() + num_q_heads * head_dim * q.element_size()
        and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    )
    if not follows:
        return None
    return q.as_strided((tokens, num_q_heads + k.shape[1], head_dim), q.stride())


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    # Separate multiplications and additions, unlike fused ones, round the same way in vectorized
    # loops and in their scalar tails, so a token's result does not depend on its place in the
    # batch.
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    if x.dtype == torch.float32:
        first_sin, second_sin = first * sin, second * sin
        first.mul_(cos).sub_(second_sin)
        second.mul_(cos).add_(first_sin)
        return
    first_fp32, second_fp32 = first.float(), second.float()
    first.copy_(first_fp32 * cos - second_fp32 * sin)
    second.copy_(second_fp32 * cos + first_fp32 * sin)


def store_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Writes keys [T, Hkv, D] and values [T, Hkv, Dv] to the caches, at cells `slot_mapping`
    [T]."""
    for heads, cache, scale in zip((k, v), (k_cache, v_cache), scales, strict=True):
        width = heads.shape[1] * heads.shape[2]
        write_cells(cache.view(-1, width), slot_mapping, heads.reshape(-1, width), scale)


def write_cells(
    cells: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor, scale: float
) -> None:
    """Writes rows [T, N] to the cells [C, N] of a cache with the indices `slot_mapping` [T]; FP8
    cells contain rows / scale, clamped to the range of e4m3."""
    if cells.dtype == torch.float8_e4m3fn:
        scaled = (rows.float() * (1.0 / scale)).clamp_(-_FP8_MAX, _FP8_MAX)
        # As bytes, since torch has no index_copy_ for FP8.
        rows, cells = scaled.to(cells.dtype).view(torch.uint8), cells.view(torch.uint8)
    cells.index_copy_(0, slot_mapping, rows)
