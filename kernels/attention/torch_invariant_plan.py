"""Plans of batch-invariant torch attention, one per step.

Keys are divided into splits at fixed positions (0, S, 2S, ...), regardless of batch, chunk and
prefix; the last split is padded to S and masked. Queries are divided into tiles at fixed positions,
too (0, Q, 2Q, ...): a query is always row `position % Q` of its tile, and rows without a query are
zeros. Each (tile, KV head, split) is one matmul of the same shape, in which rows do not affect each
other, and a tile's splits are merged in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention.base import AttentionMetadata, window_start
from kernels.attention.torch_plan import causal_mask, visible_length

SPLIT_TOKENS = 128
"""Number of keys per split (one page if pages are larger)."""
TILE_QUERIES = 4
"""Number of queries per tile: more would speed up long extends and slow down decoding."""
# Maximum number of queries of a block, which bounds the scratch memory for a long chunk.
_MAX_QUERIES = 1024
_HIDDEN = 1e30


@dataclass(frozen=True, kw_only=True, slots=True)
class InvariantSplit:
    """One split of keys, and the tiles of a block that attend to any of its keys."""

    first: int
    stop: int
    """Exclusive end of the tiles [first, stop) that attend to the split."""
    pages: torch.Tensor
    """int64: page ids of the split, for each tile (decode) or for all tiles together (extend)."""
    mask: torch.Tensor
    """fp32 [tiles, 1, Q, 1, S]: 0, or -inf for masked keys. With a window, masked keys have -1e30:
    all keys of a query in a split may be masked, and the split's result then has no weight relative
    to other splits. There is always a mask, since the library would select another kernel without
    one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InvariantBlock:
    """Queries [start, stop), laid out in tiles."""

    start: int
    stop: int
    num_tiles: int
    places: torch.Tensor
    """[stop - start] int64: tile * Q + row within the tile, for each query."""
    splits: tuple[InvariantSplit, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class InvariantPlan:
    """Plan for all queries of a step."""

    split: int
    """Number of keys per split."""
    blocks: tuple[InvariantBlock, ...]
    has_window: bool
    """Whether there is a window, so that some tiles do not attend to the first split."""


def plan_invariant_decode(metadata: AttentionMetadata) -> InvariantPlan:
    """Plans decodes: one tile per row, in descending order of length, so that the tiles that reach
    a split are consecutive."""
    page_table, page_size = metadata.page_table, metadata.page_size
    seq_lens_host = metadata.seq_lens_host
    split = max(SPLIT_TOKENS, page_size)
    device = page_table.device
    blocks = []
    for start in range(0, len(seq_lens_host), _MAX_QUERIES):
        lengths = [max(1, length) for length in seq_lens_host[start : start + _MAX_QUERIES]]
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        places = [0] * len(lengths)
        for tile, row in enumerate(order):
            places[row] = tile * TILE_QUERIES + (lengths[row] - 1) % TILE_QUERIES
        table = page_table.index_select(0, torch.tensor(order, device=device) + start)
        visible = torch.tensor([lengths[row] for row in order], device=device)
        visible = visible.view(-1, 1).expand(-1, TILE_QUERIES)
        splits = []
        for position in range(0, max(lengths), split):
            stop = sum(length > position for length in lengths)
            first = sum(metadata.first_visible(n - 1) >= position + split for n in lengths)
            if first == stop:
                continue
            pages = _split_pages(table[first:stop], position, split, page_size)
            mask = _split_mask(visible[first:stop], position, split, metadata)
            splits.append(InvariantSplit(first=first, stop=stop, pages=pages, mask=mask))
        blocks.append(
            InvariantBlock(
                start=start,
                stop=start + len(lengths),
                num_tiles=len(lengths),
                places=torch.tensor(places, device=device),
                splits=tuple(splits),
            )
        )
    return InvariantPlan(split=split, blocks=tuple(blocks), has_window=metadata.window > 0)


def plan_invariant_extend(metadata: AttentionMetadata) -> InvariantPlan:
    """Plans extends: one block per row, or several if the row has very many queries."""
    page_table, page_size = metadata.page_table, metadata.page_size
    split = max(SPLIT_TOKENS, page_size)
    blocks = []
    row_start = 0
    lengths = zip(metadata.seq_lens_host, metadata.query_lens_host, strict=True)
    for row, (seq_len, query_len) in enumerate(lengths):
        for begin in range(0, query_len, _MAX_QUERIES):
            end = min(begin + _MAX_QUERIES, query_len)
            offset = seq_len - query_len  # position of the row's first new token
            blocks.append(
                _extend_block(
                    page_table[row : row + 1],
                    (row_start + begin, row_start + end),
                    (offset + begin, offset + end),
                    seq_len,
                    split,
                    metadata,
                )
            )
        row_start += query_len
    return InvariantPlan(split=split, blocks=tuple(blocks), has_window=metadata.window > 0)


def _extend_block(
    table: torch.Tensor,
    queries: tuple[int, int],
    positions: tuple[int, int],
    seq_len: int,
    split: int,
    metadata: AttentionMetadata,
) -> InvariantBlock:
    block_size, window = metadata.block_size, metadata.window
    first_tile = positions[0] // TILE_QUERIES
    num_tiles = -(-positions[1] // TILE_QUERIES) - first_tile
    origin = first_tile * TILE_QUERIES
    visible = torch.arange(origin, origin + num_tiles * TILE_QUERIES, device=table.device)
    visible = ((visible // block_size + 1) * block_size).view(num_tiles, TILE_QUERIES)
    lowest, end = origin, visible_length(positions[1] - 1, block_size)
    if metadata.is_bidirectional:
        lowest, end = seq_len - 1, seq_len
        visible = torch.full_like(visible, seq_len)
    splits = []
    begin = metadata.first_visible(lowest) // split * split
    for position in range(begin, end, split):
        # Splits begin where blocks and tiles begin. All queries of tiles at or after its beginning,
        # and of tiles in the same block as one of these, attend to some keys of the split; earlier
        # queries do not. All queries of a bidirectional row attend to some keys of every split.
        first = max(0, position // block_size * block_size // TILE_QUERIES - first_tile)
        stop = num_tiles
        if metadata.is_bidirectional:
            first = 0
        elif window:  # if a tile's first query is past the split, so are its others
            blind = position + split + window - 1
            if metadata.is_chunked:
                blind = -(-(position + split) // window) * window
            stop = min(stop, -(-(blind - origin) // TILE_QUERIES))
        pages = _split_pages(table, position, split, metadata.page_size)
        mask = _split_mask(visible[first:stop], position, split, metadata)
        splits.append(InvariantSplit(first=first, stop=stop, pages=pages, mask=mask))
    return InvariantBlock(
        start=queries[0],
        stop=queries[1],
        num_tiles=num_tiles,
        places=torch.arange(positions[0] - origin, positions[1] - origin, device=table.device),
        splits=tuple(splits),
    )


def _split_pages(table: torch.Tensor, position: int, split: int, page_size: int) -> torch.Tensor:
    """Page ids of positions [position, position + split) for each row; 0 past the table's end."""
    columns = split // page_size
    start = position // page_size
    part = table[:, start : start + columns]
    missing = columns - part.shape[1]
    if missing:
        part = torch.nn.functional.pad(part, (0, missing))
    return part.flatten().long()


def _split_mask(
    visible: torch.Tensor, position: int, split: int, metadata: AttentionMetadata
) -> torch.Tensor:
    positions = torch.arange(position, position + split, device=visible.device)
    visible = visible.view(-1, 1, TILE_QUERIES, 1, 1)
    mask = causal_mask(positions, visible)
    if not metadata.window:
        return mask
    starts = window_start(visible - 1, metadata.window, metadata.is_chunked)
    return mask.masked_fill_(positions < starts, -_HIDDEN).clamp_(min=-_HIDDEN)
