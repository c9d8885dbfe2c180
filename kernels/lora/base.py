"""Weights of a layer's LoRA adapters, and the tokens of a step, by adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from kernels.native import NativeLora, TokenGroups

TILE_TOKENS = 16
"""Number of tokens per tile: the minimum rows of a `tl.dot`."""
RANK_STEP = 16
"""Ranks of buffers are multiples of this: the minimum depth of a `tl.dot`."""
_BLOCK_COLUMNS = 64
"""Output features per program of the kernel."""


class LoraPart(NamedTuple):
    """Output features [start, stop) of a layer, computed by one projection of the checkpoint."""

    start: int
    stop: int
    group: int
    """Index of the projection among those that the layer fuses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraWeights:
    """Low-rank weights of all adapters of one linear layer, which may fuse several projections."""

    a: torch.Tensor
    """[slots, groups * rank, in]: A matrices, one projection after another."""
    b: torch.Tensor
    """[slots, rank, out]: transposed B matrices, multiplied by the adapters' scales."""
    blocks: torch.Tensor
    """int32 [blocks, 3]: first output feature, end and projection of each block of the kernel."""
    parts: tuple[LoraPart, ...]
    """The layer's output features by projection, in order and without gaps."""
    batch_invariant: bool
    """Whether a token's result must be bitwise independent of other tokens."""
    native: NativeLora | None
    """The same weights for the compiled library; None if it is not used."""

    @classmethod
    def allocate(
        cls,
        *,
        num_slots: int,
        in_features: int,
        parts: Sequence[LoraPart],
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool,
        is_native: bool = False,
    ) -> Self:
        """Allocates buffers without adapters.

        Args:
            num_slots: number of adapters.
            in_features: number of input features.
            parts: as in LoraWeights.
            rank: maximum rank; the rank of the buffers is the next multiple of `RANK_STEP`.
            dtype: data type of weights and activations.
            device: device of the weights.
            batch_invariant: as in LoraWeights.
            is_native: whether the compiled CPU library computes the adapters.
        """
        num_groups, rank = 1 + max(part.group for part in parts), padded_rank(rank)
        a = torch.zeros(num_slots, num_groups * rank, in_features, dtype=dtype, device=device)
        b = torch.zeros(num_slots, rank, parts[-1].stop, dtype=dtype, device=device)
        blocks = [
            (start, min(start + _BLOCK_COLUMNS, part.stop), part.group)
            for part in parts
            for start in range(part.start, part.stop, _BLOCK_COLUMNS)
        ]
        return cls(
            a=a,
            b=b,
            blocks=torch.tensor(blocks, dtype=torch.int32, device=device),
            parts=tuple(parts),
            batch_invariant=batch_invariant,
            native=NativeLora(a, b, parts) if is_native else None,
        )

    @property
    def rank(self) -> int:
        """Rank of the buffers."""
        return self.b.shape[1]

    @property
    def num_groups(self) -> int:
        """Number of projections."""
        return self.a.shape[1] // self.rank

    def load(self, slot: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Copies an adapter to slot `slot` (1-based) without waiting for the device.

        Args:
            a: [groups, r, in]: A matrices by projection.
            b: [r, out]: transposed B matrices, multiplied by the adapter's scale.
        """
        rank = len(b)
        self._set_rank(slot, rank)
        own_a = self.a[slot - 1].view(self.num_groups, self.rank, -1)
        own_a[:, :rank].copy_(a, non_blocking=True)
        self.b[slot - 1, :rank].copy_(b, non_blocking=True)
        if rank < self.rank:
            own_a[:, rank:].zero_()
            self.b[slot - 1, rank:].zero_()

    def clear(self, slot: int) -> None:
        """Removes the adapter from slot `slot` (1-based)."""
        self._set_rank(slot, 0)
        self.a[slot - 1].zero_()
        self.b[slot - 1].zero_()

    def _set_rank(self, slot: int, rank: int) -> None:
        if self.native is not None:
            self.native.ranks[slot - 1] = rank

    @property
    def num_bytes(self) -> int:
        """Size of the buffers, in bytes."""
        return (self.a.numel() + self.b.numel()) * self.a.element_size()


def padded_rank(rank: int) -> int:
    """The buffer rank for adapters of this rank."""
    return -(-rank // RANK_STEP) * RANK_STEP


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraTiles:
    """Tokens of a step that have an adapter, in tiles of one adapter each."""

    slots: torch.Tensor
    """int32 [N]: 1-based slot of each tile's adapter; 0 for an unused tile."""
    tokens: torch.Tensor
    """int32 [N * TILE_TOKENS]: indices of the tiles' tokens among the step's; -1 for unused
    entries, which follow the tokens of a tile."""
    groups: TokenGroups | None = None
    """The same tokens grouped by adapter, which all layers of a step on CPU share; None if each
    layer computes them."""


def token_groups(slots: torch.Tensor, tokens: torch.Tensor) -> TokenGroups:
    """The tokens of tiles by adapter; arguments as in LoraTiles, on the host."""
    slots = slots.repeat_interleave(TILE_TOKENS)
    is_used = tokens >= 0
    slots, tokens = slots[is_used], tokens[is_used].long()
    found, counts = torch.unique_consecutive(slots, return_counts=True)
    ends = counts.cumsum(0)
    return TokenGroups(tokens, torch.stack((found.long(), ends - counts, ends), dim=1))


def token_slots(tiles: LoraTiles, num_tokens: int) -> torch.Tensor:
    """Slots of a step's T tokens, int64 [T]; 0 for tokens without an adapter. Does not wait for the
    device."""
    slots = tiles.slots.long().repeat_interleave(TILE_TOKENS, output_size=len(tiles.tokens))
    tokens = tiles.tokens.long()
    tokens = tokens.where(tokens >= 0, num_tokens)
    found = torch.zeros(num_tokens + 1, dtype=torch.int64, device=slots.device)
    return found.scatter_(0, tokens, slots)[:num_tokens]


def tiles_of_one(slot: int, num_tokens: int, device: torch.device) -> LoraTiles:
    """Tiles of tokens that all have the adapter in slot `slot` (1-based). Does not wait for the
    device."""
    num_tiles = -(-num_tokens // TILE_TOKENS)
    tokens = torch.arange(num_tiles * TILE_TOKENS, dtype=torch.int32, device=device)
    return LoraTiles(
        slots=torch.full((num_tiles,), slot, dtype=torch.int32, device=device),
        tokens=tokens.masked_fill_(tokens >= num_tokens, -1),
    )


def count_tiles(num_tokens: int, num_slots: int) -> int:
    """Maximum number of tiles of a step: each adapter has at most one that is not full."""
    return min(num_tokens, num_tokens // TILE_TOKENS + num_slots)


def tile_arrays(
    adapters: npt.NDArray[np.int32], num_tiles: int = 0
) -> dict[str, npt.NDArray[np.int32]]:
    """Arrays `slots` and `tokens` of `LoraTiles`.

    Args:
        adapters: [T]: slot of each token's adapter; 0 for tokens without one.
        num_tiles: number of tiles, the last of which may be unused; 0 for as many as needed.
    """
    order, slots, firsts, counts = _by_adapter(adapters)
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


def host_groups(adapters: npt.NDArray[np.int32]) -> TokenGroups:
    """The tokens that have an adapter, grouped by adapter; `adapters` [T] holds the slot of each
    token's adapter, or 0."""
    order, slots, firsts, counts = _by_adapter(adapters)
    table = np.stack((slots.astype(np.int64), firsts, firsts + counts), axis=1)
    return TokenGroups(torch.from_numpy(order), torch.from_numpy(table))


def _by_adapter(
    adapters: npt.NDArray[np.int32],
) -> tuple[
    npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]
]:
    """Indices of the tokens that have an adapter, one adapter after another; for each adapter, its
    slot, the offset of its first index, and its number of indices."""
    order = np.argsort(adapters, kind="stable")
    order = order[np.searchsorted(adapters[order], 1) :]  # tokens without an adapter come first
    slots, firsts, counts = np.unique(adapters[order], return_index=True, return_counts=True)
    return order, slots, firsts, counts
