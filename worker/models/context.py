"""What a forward pass needs besides tokens and positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention import AttentionStep


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """One layer's keys and values, each [num_pages, page_size, local kv heads, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionInputs:
    """What the layers of one group have in common in a step."""

    slot_mapping: torch.Tensor
    """[T] int64: where each token's key and value go, page * page_size + offset."""
    decode: AttentionStep | None
    """None without decode rows."""
    extend: AttentionStep | None
    """None without longer rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardContext:
    """The step's caches and planned attention. Tokens of decode rows come first."""

    kv_caches: tuple[KVCache, ...]
    """Each layer's."""
    attention: tuple[AttentionInputs, ...]
    """Each layer's; one object for all layers of a group."""
    num_decode_tokens: int
    """Leading tokens that are rows of their own."""
    read_tokens: torch.Tensor | None = None
    """[S] int64, ascending: tokens whose hidden states anyone reads; None for all. Of the others
    the last layer computes keys and values alone."""
