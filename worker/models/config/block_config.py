"""Configuration of block-sparse attention (MiniMax M3). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSparseConfig:
    """Block-sparse attention: an indexer scores the blocks of tokens before a query, which then
    attends to those with the highest scores and to its own. Each KV head has its own selection."""

    block_size: int
    """Number of tokens of a block, which begins at a multiple of it."""
    num_blocks: int
    """Number of blocks that a query attends to, its own included."""
    head_dim: int
    """Dimensions of the indexer's queries, one per KV head, and of its keys, one per token."""
    layers: tuple[bool, ...]
    """Whether attention is sparse, per layer."""

    @property
    def top_k(self) -> int:
        """Number of tokens up to which a query attends to all."""
        return self.block_size * self.num_blocks
