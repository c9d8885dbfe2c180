"""Paged attention with grouped query heads: one query per row (decode) or many (extend).

`prepare_decode` / `prepare_extend` compute once per step what every layer of the step shares.
"""

from __future__ import annotations

import torch

from kernels.attention import reference
from kernels.attention.backends import create_attention_backend
from kernels.attention.base import AttentionBackend, AttentionBackendName, CapturableBackend
from kernels.attention.metadata import (
    DecodeMetadata,
    ExtendMetadata,
    prepare_decode,
    prepare_extend,
)
from kernels.registry import registry

_DECODE = registry.register(
    "decode_attention",
    reference.decode_attention,
    triton="kernels.attention.triton_decode:decode_attention",
)
_EXTEND = registry.register(
    "extend_attention",
    reference.extend_attention,
    triton="kernels.attention.triton_extend:extend_attention",
)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: DecodeMetadata,
    *,
    scale: float,
) -> torch.Tensor:
    """Attend with one query per row over positions [0, seq_lens[b]) of its pages.

    q is [B, Hq, D] (heads side by side), the caches [num_pages, page_size, Hkv, D]; returns
    [B, Hq, D]. Query head h reads kv head h // (Hq // Hkv). The caches must hold finite numbers
    everywhere, unused slots too: allocate them with zeros. A row of length 0 (padding) yields
    finite numbers without meaning.
    """
    if metadata.step is not None:
        return metadata.step.attend(q, k_cache, v_cache, scale)
    return _DECODE.select(q)(q, k_cache, v_cache, metadata, scale)


def extend_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: ExtendMetadata,
    *,
    scale: float,
) -> torch.Tensor:
    """Attend with the new tokens of each row, causally, over cached prefix and themselves.

    q is [T, Hq, D], rows one after another as `query_start` says; their keys and values are in the
    cache already. Query i of row b stands at position seq_lens[b] - query_len + i. Returns
    [T, Hq, D]. Layouts and conditions as for `decode_attention`.
    """
    if metadata.step is not None:
        return metadata.step.attend(q, k_cache, v_cache, scale)
    return _EXTEND.select(q)(q, k_cache, v_cache, metadata, scale)


__all__ = [
    "AttentionBackend",
    "AttentionBackendName",
    "CapturableBackend",
    "DecodeMetadata",
    "ExtendMetadata",
    "create_attention_backend",
    "decode_attention",
    "extend_attention",
    "prepare_decode",
    "prepare_extend",
]
