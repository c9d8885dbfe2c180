"""Attention schedule: a list of work items for programs, created on the device once per step.

A tile is one or several queries of a row, with all heads that share a KV head. Its keys are split
among several programs, whose number depends on the lengths of all rows: one long row among short
ones is divided among many programs. The host has only upper bounds of lengths, and so of the number
of items: programs past the last item exit immediately.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention.triton_config import (
    INVARIANT_SPLIT_TOKENS,
    MAX_INVARIANT_SPLITS,
    AttentionBlocks,
)
from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.tiles import cdiv

TARGET_PROGRAMS = 512
"""Number of programs that fill a large GPU with decodes: four per multiprocessor; extends need half
as many."""
_ITEM_WIDTH = 8
"""Number of fields of an item; five of them are used."""
_WIDTH = tl.constexpr(_ITEM_WIDTH)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRows:
    """B rows with one query each (decodes), or any number (extends)."""

    page_table: torch.Tensor
    """[*, P] int32: page ids."""
    seq_lens: torch.Tensor
    """[B] int32: number of positions up to each row's last query."""
    query_start: torch.Tensor | None
    """[B + 1] int32: offsets of the rows' queries; None if row i has only query i."""
    page_rows: torch.Tensor | None = None
    """[B] int32: rows of the page table; None if row i uses row i of the table."""
    window: int = 0
    """Sliding window, as in AttentionMetadata; 0 for full attention."""
    is_chunked: bool = False
    """Whether windows begin at multiples of their length."""
    block_size: int = 1
    """Number of consecutive positions that attend to each other; 1 for causal attention."""
    is_bidirectional: bool = False
    """Whether all queries of a row attend to the same positions, as in AttentionMetadata."""

    def part(self, rows: slice) -> AttentionRows:
        """The rows in a slice; supported for decodes only."""
        assert self.query_start is None, "only decodes can be sliced"
        page_rows, page_table = self.page_rows, self.page_table
        if page_rows is None:
            page_table = page_table[rows]
        else:
            page_rows = page_rows[rows]
        return AttentionRows(
            page_table=page_table,
            seq_lens=self.seq_lens[rows],
            query_start=None,
            page_rows=page_rows,
            window=self.window,
            is_chunked=self.is_chunked,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Work items of a step; each is computed by one program per KV head."""

    rows: AttentionRows
    blocks: AttentionBlocks
    queries: int
    """Number of queries per tile."""
    items: torch.Tensor
    """[n, 8] int32: row (-1 if there is no item), tile of the row, split of the tile, tokens per
    split, index of the partial output. The items of a tile are consecutive."""
    arrived: torch.Tensor
    """[n, KV heads] int32: number of splits of a tile that have been stored, at the tile's first
    item; zero between launches."""
    num_partials: int
    """Upper bound of the number of partial outputs: one per item of a tile with several splits."""


def make_schedule(
    rows: AttentionRows,
    blocks: AttentionBlocks,
    *,
    queries: int,
    num_tiles: int,
    most_visible: int,
    num_kv_heads: int,
    batch_invariant: bool,
) -> Schedule:
    """Launches the kernel that lists the items.

    Args:
        rows: the step's rows.
        blocks: tile sizes of the attention kernel.
        queries: number of queries per tile.
        num_tiles: number of tiles of all rows, or an upper bound.
        most_visible: maximum number of positions to which a tile's queries attend, or an upper
            bound.
        num_kv_heads: number of KV heads, and so of programs per item.
        batch_invariant: whether the splits of a row depend only on its own length.
    """
    least = INVARIANT_SPLIT_TOKENS if batch_invariant else blocks.least_split
    most_splits = max(1, cdiv(most_visible, least))
    programs = TARGET_PROGRAMS if rows.query_start is None else TARGET_PROGRAMS // 2
    target = max(1, programs // num_kv_heads)
    if batch_invariant:
        most_splits = min(most_splits, MAX_INVARIANT_SPLITS)
        num_items = num_partials = num_tiles * most_splits
    else:
        num_items = min(num_tiles * most_splits, num_tiles + target)
        # A row with n > 1 splits has more keys than fit in n / 2 splits.
        num_partials = min(num_items, 2 * target)
    device, num_rows = rows.seq_lens.device, rows.seq_lens.shape[0]
    items = torch.empty(num_items, _ITEM_WIDTH, dtype=torch.int32, device=device)
    arrived = torch.empty(num_items, num_kv_heads, dtype=torch.int32, device=device)
    size = 32
    _schedule_kernel[(cdiv(num_items, size),)](
        items, arrived, rows.seq_lens,
        rows.seq_lens if rows.query_start is None else rows.query_start,
        num_rows, num_items, target,
        RAGGED=rows.query_start is not None, INVARIANT=batch_invariant, WINDOW=rows.window,
        QUERIES=queries, KEYS=blocks.keys, LEAST=least, MOST_SPLITS=MAX_INVARIANT_SPLITS,
        NUM_KV_HEADS=num_kv_heads, ITEMS=size, ROWS=64, num_warps=4,
    )  # fmt: skip
    return Schedule(
        rows=rows,
        blocks=blocks,
        queries=queries,
        items=items,
        arrived=arrived,
        num_partials=num_partials,
    )


@triton.jit
def _sizes_of(
    row, num_rows, seq_len_ptr, query_start_ptr,
    RAGGED: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Maximum number of keys to which a tile of each row attends, and the row's number of tiles; 0
    past the last row."""
    exists = row < num_rows
    keys = tl.load(seq_len_ptr + row, mask=exists, other=0)
    tiles = exists.to(tl.int32)
    if RAGGED:
        first = tl.load(query_start_ptr + row, mask=exists, other=0)
        tiles = tl.cdiv(tl.load(query_start_ptr + row + 1, mask=exists, other=0) - first, QUERIES)
    if WINDOW > 0:
        keys = tl.minimum(keys, WINDOW + QUERIES - 1)
    return keys, tiles


@triton.jit
def _pick(mine, values):
    """Value [I] of the row to which each item belongs, from values [R] and a mask [I, R]; 0 if
    there is none."""
    return tl.sum(tl.where(mine, values[None, :], 0), axis=1)


@dependent_kernel(
    do_not_specialize=["num_rows", "num_items", "target"],
    do_not_specialize_on_alignment=["seq_len_ptr", "query_start_ptr"],
)
def _schedule_kernel(
    items_ptr, arrived_ptr, seq_len_ptr, query_start_ptr, num_rows, num_items, target,
    RAGGED: tl.constexpr, INVARIANT: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, LEAST: tl.constexpr, MOST_SPLITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, ITEMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    total = tl.full((), 0, tl.int64)
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        keys, tiles = _sizes_of(
            row, num_rows, seq_len_ptr, query_start_ptr, RAGGED, WINDOW, QUERIES
        )
        total += tl.sum(keys.to(tl.int64) * tiles, axis=0)
    share = tl.maximum(tl.cdiv(total, target), LEAST).to(tl.int32)

    begun = tl.full((), 0, tl.int32)
    partials = tl.full((), 0, tl.int32)
    own_row = tl.full((ITEMS,), -1, tl.int32)
    tile = tl.full((ITEMS,), 0, tl.int32)
    split = tl.full((ITEMS,), 0, tl.int32)
    length_of = tl.full((ITEMS,), 0, tl.int32)
    partial = tl.full((ITEMS,), 0, tl.int32)
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        keys, tiles = _sizes_of(
            row, num_rows, seq_len_ptr, query_start_ptr, RAGGED, WINDOW, QUERIES
        )
        if INVARIANT:
            splits = tl.cdiv(keys, tl.maximum(tl.cdiv(keys, MOST_SPLITS), LEAST))
        else:
            splits = tl.cdiv(keys, share)
        splits = tl.maximum(splits, 1)
        count = tiles * splits
        shared = tl.where(splits > 1, count, 0)
        start = begun + tl.cumsum(count, axis=0) - count
        first_partial = partials + tl.cumsum(shared, axis=0) - shared
        mine = (start[None, :] <= item[:, None]) & (item[:, None] < (start + count)[None, :])
        found = tl.sum(mine.to(tl.int32), axis=1) > 0
        within = item - _pick(mine, start)
        own_row = tl.where(found, _pick(mine, row), own_row)
        own_splits = tl.maximum(_pick(mine, splits), 1)
        # A row's last tile has the most keys and comes first, so that no long item starts last.
        tile = tl.where(found, _pick(mine, tiles) - 1 - within // own_splits, tile)
        split = tl.where(found, within % own_splits, split)
        length = tl.maximum(tl.cdiv(tl.cdiv(keys, splits), KEYS), 1) * KEYS
        length_of = tl.where(found, _pick(mine, length), length_of)
        partial = tl.where(found, _pick(mine, first_partial) + within, partial)
        begun += tl.sum(count, axis=0)
        partials += tl.sum(shared, axis=0)

    cell = items_ptr + item * _WIDTH
    exists = item < num_items
    tl.store(cell, own_row, mask=exists)
    tl.store(cell + 1, tile, mask=exists)
    tl.store(cell + 2, split, mask=exists)
    tl.store(cell + 3, length_of, mask=exists)
    tl.store(cell + 4, partial, mask=exists)
    for head in range(NUM_KV_HEADS):
        tl.store(arrived_ptr + item * NUM_KV_HEADS + head, 0, mask=exists)
