"""Torch rotary embedding."""

from __future__ import annotations

import torch


def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> None:
    """Rotate q and k in place; in one pass where k directly follows q in memory."""
    cos_sin = cos_sin_cache.index_select(0, positions).unsqueeze(1)
    cos, sin = cos_sin.chunk(2, dim=-1)
    joined = _joined_heads(q, k)
    if joined is not None:
        _rotate(joined, cos, sin)
        return
    _rotate(q, cos, sin)
    _rotate(k, cos, sin)


def _joined_heads(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """The heads of q and k as one view [T, Hq + Hkv, D], where a fused projection laid them so."""
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
    # Separate multiplications and additions (no fused ones) round alike in vector bodies and
    # scalar tails, so a token's result does not depend on its place in the batch.
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
