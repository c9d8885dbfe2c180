"""Weights of a layer's LoRA adapters, and the tokens of a step by adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.native import NativeLora

TILE_TOKENS = 16
"""Number of tokens per tile: the least number of rows of a matrix product in Triton."""
RANK_STEP = 16
"""Ranks of buffers are multiples of this: the least depth of a matrix product in Triton."""
_FEW_TOKENS = 64
"""Tokens of an adapter up to which the compiled library, which uses one thread, is faster than
torch."""
_BLOCK_COLUMNS = 64
"""Output features per program of the kernel."""


class LoraPart(NamedTuple):
    """Output features [start, stop) of a layer, which one projection of the checkpoint computes."""

    start: int
    stop: int
    group: int
    """Index of the projection among those that the layer fuses."""


class LoraWeights:
    """Low-rank weights of all adapters of one linear layer, which may fuse several projections.

    Args:
        num_slots: number of adapters.
        in_features: number of input features.
        parts: the layer's output features by projection, in order and without gaps.
        rank: maximum rank; buffers have the next multiple of `RANK_STEP`.
        dtype: data type of weights and activations.
        device: device of the weights.
        batch_invariant: whether a token's result must be bitwise independent of the others.
        is_native: whether the compiled CPU library computes steps of few tokens.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        in_features: int,
        parts: Sequence[LoraPart],
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool,
        is_native: bool = False,
    ) -> None:
        self.rank = padded_rank(rank)
        """Rank of the buffers; weights are zero from an adapter's own rank on."""
        self.parts = tuple(parts)
        self.batch_invariant = batch_invariant
        self.ranks = torch.zeros(num_slots, dtype=torch.int64)
        """int64 [slots] on the host: rank of the adapter in each slot; 0 without one."""
        self.num_groups = 1 + max(part.group for part in parts)
        out_features = parts[-1].stop
        self.a = torch.zeros(
            num_slots, self.num_groups * self.rank, in_features, dtype=dtype, device=device
        )
        """[slots, groups * rank, in]: first factors, of one projection after another."""
        self.b = torch.zeros(num_slots, self.rank, out_features, dtype=dtype, device=device)
        """[slots, rank, out]: transposed second factors, times the adapters' scales."""
        blocks = [
            (start, min(start + _BLOCK_COLUMNS, part.stop), part.group)
            for part in parts
            for start in range(part.start, part.stop, _BLOCK_COLUMNS)
        ]
        self.blocks = torch.tensor(blocks, dtype=torch.int32, device=device)
        """int32 [blocks, 3]: first output feature, end and projection of each block of the
        kernel."""
        self.native: NativeLora | None = None
        """The same weights for the compiled library; None if it is not used."""
        if is_native:
            table = torch.tensor(self.parts, dtype=torch.int64)
            self.native = NativeLora(self.a, self.b, self.ranks, table)

    def load(self, slot: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Copies an adapter to slot `slot`, from 1, without waiting for the device.

        Args:
            slot: the slot.
            a: [groups, r, in]: first factors by projection.
            b: [r, out]: transposed second factors, times the adapter's scale.
        """
        rank = len(b)
        self.ranks[slot - 1] = rank
        own_a = self.a[slot - 1].view(self.num_groups, self.rank, -1)
        own_a[:, :rank].copy_(a, non_blocking=True)
        self.b[slot - 1, :rank].copy_(b, non_blocking=True)
        if rank < self.rank:
            own_a[:, rank:].zero_()
            self.b[slot - 1, rank:].zero_()

    def clear(self, slot: int) -> None:
        """Removes the adapter from slot `slot`, from 1."""
        if self.ranks[slot - 1]:
            self.ranks[slot - 1] = 0
            self.a[slot - 1].zero_()
            self.b[slot - 1].zero_()

    @property
    def num_bytes(self) -> int:
        """Size of the buffers."""
        return (self.a.numel() + self.b.numel()) * self.a.element_size()


def padded_rank(rank: int) -> int:
    """The rank of buffers for adapters of this rank."""
    return -(-rank // RANK_STEP) * RANK_STEP


@dataclass(frozen=True, kw_only=True)
class LoraTiles:
    """Tokens of a step that have an adapter, in tiles of one adapter each."""

    slots: torch.Tensor
    """int32 [N]: slot of each tile's adapter, from 1; 0 for an unused tile."""
    tokens: torch.Tensor
    """int32 [N * TILE_TOKENS]: indices of the tiles' tokens among the step's; -1 for none, after
    all others of a tile."""

    @cached_property
    def groups(self) -> TokenGroups:
        """The tokens by adapter, on the host."""
        slots = self.slots.repeat_interleave(TILE_TOKENS)
        is_used = self.tokens >= 0
        slots, tokens = slots[is_used], self.tokens[is_used].long()
        found, counts = torch.unique_consecutive(slots, return_counts=True)
        ends = counts.cumsum(0)
        table = torch.stack((found.long(), ends - counts, ends), dim=1)
        is_short = counts <= _FEW_TOKENS
        return TokenGroups(tokens, table, table[is_short], table[~is_short])


class TokenGroups(NamedTuple):
    """Tokens of a step by adapter, on the host.

    Tables are int64 [adapters, 3]: slot from 1, first of its `tokens`, end.
    """

    tokens: torch.Tensor
    """int64 [n]: indices of the tokens, of one adapter after another."""
    table: torch.Tensor
    """All adapters."""
    short: torch.Tensor
    """Adapters of few tokens."""
    long: torch.Tensor
    """Adapters of many tokens."""


def count_tiles(num_tokens: int, num_slots: int) -> int:
    """Maximum number of tiles of a step: each adapter has at most one that is not full."""
    return min(num_tokens, num_tokens // TILE_TOKENS + num_slots)


def tile_arrays(
    adapters: npt.NDArray[np.int32], num_tiles: int = 0
) -> dict[str, npt.NDArray[np.int32]]:
    """Arrays `slots` and `tokens` of `LoraTiles`.

    Args:
        adapters: [T] slot of each token's adapter; 0 without one.
        num_tiles: number of tiles, the last of which may be unused; 0 for as many as needed.
    """
    order = np.argsort(adapters, kind="stable")
    order = order[np.searchsorted(adapters[order], 1) :]  # tokens without an adapter come first
    slots, firsts, counts = np.unique(adapters[order], return_index=True, return_counts=True)
    tiles_of = -(-counts // TILE_TOKENS)
    num_used = int(tiles_of.sum())
    num_tiles = num_tiles or num_used
    assert num_used <= num_tiles, f"{num_used} tiles of tokens, more than {num_tiles}"
    first_tiles = np.cumsum(tiles_of) - tiles_of
    cells = np.repeat(first_tiles * TILE_TOKENS - firsts, counts) + np.arange(len(order))
    tokens = np.full(num_tiles * TILE_TOKENS, -1, dtype=np.int32)
    tokens[cells] = order
    tile_slots = np.zeros(num_tiles, dtype=np.int32)
    tile_slots[:num_used] = np.repeat(slots, tiles_of)
    return {"slots": tile_slots, "tokens": tokens}
