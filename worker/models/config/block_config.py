"""Configuration of block-sparse attention (MiniMax M3). Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSparseConfig:
    """Block-sparse attention: an indexer scores the blocks of tokens before a query. The query then
    attends to those with the highest scores and to its own block. Each KV head has its own
    selection."""

    block_size: int
    """Number of tokens per block; blocks begin at multiples of it."""
    num_blocks: int
    """Number of blocks that a query attends to, including its own."""
    head_dim: int
    """Dimensions of the indexer's queries, one per KV head, and of its keys, one per token."""
    layers: tuple[bool, ...]
    """Whether attention is sparse, per layer."""

    @property
    def top_k(self) -> int:
        """Maximum number of tokens that a query attends to. In a context of at most this many
        tokens, it attends to all of them."""
        return self.block_size * self.num_blocks
