"""Alignment of (token, expert) pairs to tiles of one expert each, in one launch."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.tiles import next_power_of_2

_BLOCK = 1024


class Tiles(NamedTuple):
    """Pairs in tiles, each of which is multiplied by one expert's weights."""

    pairs: torch.Tensor
    """[tiles * rows] int32: token * K + choice; T * K for padding rows."""
    experts: torch.Tensor
    """[tiles] int32: expert of each tile; -1 for unused tiles."""


def align_pairs(expert_ids: torch.Tensor, first_expert: int, num_experts: int, rows: int) -> Tiles:
    """Tiles of `rows` rows for the pairs [T, K] whose experts are on this rank.

    The host does not wait for the device: the number of tiles is an upper bound.

    Args:
        expert_ids: [T, K]: chosen experts.
        first_expert: id of this rank's first expert.
        num_experts: number of experts on this rank.
        rows: number of rows per tile.
    """
    num_pairs, device = expert_ids.numel(), expert_ids.device
    touched = min(num_experts, num_pairs)
    num_tiles = min(num_pairs, (num_pairs + touched * (rows - 1)) // rows)
    pairs = torch.empty(num_tiles * rows, dtype=torch.int32, device=device)
    experts = torch.empty(num_tiles, dtype=torch.int32, device=device)
    _align_kernel[(num_experts,)](
        expert_ids, pairs, experts, num_pairs, num_tiles, first_expert,
        NUM_EXPERTS=num_experts, BINS=next_power_of_2(num_experts + 1), ROWS=rows,
        BLOCK=_BLOCK,
    )  # fmt: skip
    return Tiles(pairs, experts)


# Not specialized on arguments that change with the number of tokens.
@dependent_kernel(do_not_specialize=["num_pairs", "num_tiles", "first_expert"])
def _align_kernel(
    ids_ptr, pairs_ptr, experts_ptr, num_pairs, num_tiles, first_expert,
    NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per expert. Each counts the pairs of all experts to find the offset of its
    expert's pairs, which it stores in order, so no program waits for another."""
    wait_for_previous_kernel()
    expert = tl.program_id(0)
    number = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        found = _experts_at(ids_ptr, start, num_pairs, first_expert, NUM_EXPERTS, BLOCK)
        counts += tl.histogram(found, BINS)
    tiles = tl.where(number < NUM_EXPERTS, (counts + ROWS - 1) // ROWS, 0)
    tile = tl.sum(tl.where(number < expert, tiles, 0), axis=0)
    end = tile + tl.sum(tl.where(number == expert, tiles, 0), axis=0)
    for start in range(tile, end, BLOCK):
        own = start + tl.arange(0, BLOCK)
        tl.store(experts_ptr + own, expert, mask=own < end)
    if expert == NUM_EXPERTS - 1:
        for start in range(end, num_tiles, BLOCK):
            rest = start + tl.arange(0, BLOCK)
            tl.store(experts_ptr + rest, -1, mask=rest < num_tiles)
    if end > tile:
        place = tile * ROWS
        for start in range(0, num_pairs, BLOCK):
            found = _experts_at(ids_ptr, start, num_pairs, first_expert, NUM_EXPERTS, BLOCK)
            is_own = (found == expert).to(tl.int32)
            cell = place + tl.cumsum(is_own, axis=0) - 1
            tl.store(pairs_ptr + cell, start + tl.arange(0, BLOCK), mask=is_own > 0)
            place += tl.sum(is_own, axis=0)
        empty = place + tl.arange(0, ROWS)
        tl.store(pairs_ptr + empty, num_pairs, mask=empty < end * ROWS)


@triton.jit
def _experts_at(
    ids_ptr, start, num_pairs, first_expert, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Indices, on this rank, of pairs' experts; NUM_EXPERTS for pairs of other ranks' experts, and
    past the last pair."""
    pair = start + tl.arange(0, BLOCK)
    expert = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1) - first_expert
    is_here = (pair < num_pairs) & (expert >= 0) & (expert < NUM_EXPERTS)
    return tl.where(is_here, expert, NUM_EXPERTS).to(tl.int32)
