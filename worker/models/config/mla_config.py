"""Configuration of multi-head latent attention (MLA, arXiv 2405.04434). Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerConfig:
    """DeepSeek Sparse Attention: an indexer scores the tokens before a query, and the query attends
    to those with the highest scores."""

    top_k: int
    """Number of tokens that a query attends to."""
    num_heads: int
    """Number of heads of the indexer's queries; its keys have one head."""
    head_dim: int
    """Dimensions of the indexer's queries and keys; the leading ones have the attention's rotary
    embedding."""
    is_interleaved: bool
    """Whether the indexer's rotary embedding pairs adjacent dimensions instead of the two
    halves."""
    layers: tuple[bool, ...]
    """Whether each layer has an indexer; layers without one reuse the selection of the preceding
    layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaConfig:
    """Sizes of multi-head latent attention: heads compute keys and values from one latent vector
    per token, and share the part of the key with rotary embedding."""

    q_rank: int | None
    """Size of the latent vector of queries; None if they are computed from the hidden state."""
    kv_rank: int
    """Size of the latent vector of keys and values."""
    plain_dim: int
    """Dimensions of a head's queries and keys without rotary embedding."""
    rotary_dim: int
    """Dimensions of a head's queries and keys with rotary embedding; for keys, all heads share
    them."""
    value_dim: int
    """Dimensions of a head's values."""
    is_interleaved: bool
    """Whether rotary embedding pairs adjacent dimensions instead of the two halves."""
    score_factor: float
    """Factor applied to attention scores in addition to query_dim ** -0.5."""
    indexer: IndexerConfig | None = None
    """Sparse attention; None if queries attend to all tokens."""

    @property
    def query_dim(self) -> int:
        """Dimensions of a head's queries and keys."""
        return self.plain_dim + self.rotary_dim

    @property
    def cached_dim(self) -> int:
        """Dimensions that a layer caches per token: the latent vector and the rotary part of the
        key."""
        return self.kv_rank + self.rotary_dim
