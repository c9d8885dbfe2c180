"""Block-sparse attention (MiniMax M3): per KV head, a query attends to its own block of tokens, and
to the blocks whose index keys have the highest scores."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from kernels.block_sparse_attention.base import BlockSelection
from kernels.qk_norm_rope_store.reference import rotate_heads
from kernels.registry import op
from kernels.sparse_attention import (
    SparsePiece,
    SparseQueries,
    attend_to_own_keys,
    highest_positions,
)
from kernels.sparse_attention.invariant import attend_invariantly, invariant_products

_MAX_PRODUCTS = 1 << 24
"""Maximum number of dot products of queries and keys that are computed at a time: 64 MiB in fp32.
"""
_MAX_GATHERED = 1 << 24
"""Maximum number of key elements that are gathered at a time: 64 MiB in fp32."""


@op
def select_blocks(
    q: torch.Tensor,
    cache: torch.Tensor,
    queries: SparseQueries,
    block_size: int,
    *,
    cos_sin_cache: torch.Tensor,
    batch_invariant: bool = False,
) -> BlockSelection:
    """Selects, for each query and KV head, the blocks of tokens with the highest scores, and the
    query's own block.

    The score of a block is the highest dot product q · k over its tokens at or before the query, in
    fp32 and after rotary embedding of q. Ties select the first blocks.

    Args:
        q: [N, H, D]: index queries, one per KV head; undefined afterwards.
        cache: [num_pages, page_size, 1, D]: index keys, including those of the step's tokens.
        queries: pages and positions of the queries; the selected blocks have `top_k` tokens.
        block_size: tokens per block.
        cos_sin_cache: as in `store_index_keys`.
        batch_invariant: whether a query's scores must be bitwise independent of other queries.
    """
    rotate_heads(q, queries.positions, cos_sin_cache)
    scores_of = invariant_products if batch_invariant else _products
    parts = []
    for piece in queries.pieces:
        part = slice(piece.start, piece.stop)
        positions = queries.positions[part]
        num_blocks = -(-piece.length // block_size)
        scores = torch.empty(*q[part].shape[:2], num_blocks, device=q.device)
        places = torch.arange(piece.length, device=q.device)
        count = len(scores) // len(piece.pages)
        step = max(1, _MAX_PRODUCTS // (q.shape[1] * piece.length))
        for row, pages in enumerate(piece.pages):
            keys = cache.index_select(0, pages).flatten(0, 2)[: piece.length].float()
            for start in range(row * count, (row + 1) * count, step):
                own = slice(start, min(start + step, (row + 1) * count))
                products = scores_of(q[part][own].float().flatten(0, 1), keys)
                products = products.view(-1, q.shape[1], piece.length)
                hidden = places > positions[own].unsqueeze(1)
                products.masked_fill_(hidden.unsqueeze(1), float("-inf"))
                rest = num_blocks * block_size - piece.length
                padded = pad(products, (0, rest), value=float("-inf"))
                scores[own] = padded.unflatten(-1, (num_blocks, block_size)).amax(-1)
        parts.append(best_runs(scores, piece, queries, block_size))
    return selection_of(parts, queries, block_size)


@op
def attend_to_blocks(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    selection: BlockSelection,
    *,
    scale: float,
    value_scale: float = 1.0,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Computes the attention of each query over its selected blocks: [N, Hq, D].

    Args:
        q: [N, Hq, D]; consecutive query heads share a KV head.
        caches: keys and values [num_pages, page_size, H, D], in the dtype of q or in FP8 (e4m3).
        selection: blocks from `select_blocks`.
        scale: factor by which scores are multiplied, including the scale of keys in an FP8 cache.
        value_scale: scale of values in an FP8 cache, by which the result is multiplied.
        batch_invariant: whether a query's result must be bitwise independent of other queries.
    """
    runs, num_heads = selection.runs, selection.runs.shape[1]
    head, token = (torch.arange(n, device=q.device) for n in (num_heads, selection.length))
    place = torch.arange(runs.shape[2] * selection.length, device=q.device)
    attend = attend_invariantly if batch_invariant else attend_to_own_keys
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    step = max(1, _MAX_GATHERED // (num_heads * len(place) * q.shape[2]))
    for start in range(0, len(q), step):
        part = slice(start, start + step)
        cells = (runs[part].clamp(min=0).unsqueeze(-1) + token).flatten(2)
        rows = (cells * num_heads + head.unsqueeze(1)).flatten()
        keys, values = (
            cache.view(-1, q.shape[2]).index_select(0, rows).view(-1, len(place), q.shape[2])
            for cache in caches
        )
        visible = (runs[part] >= 0).sum(-1) * selection.length - selection.hidden[part].unsqueeze(1)
        beyond = place >= visible.unsqueeze(-1)
        mask = torch.zeros(beyond.shape, dtype=q.dtype, device=q.device)
        mask.masked_fill_(beyond, float("-inf"))
        grouped = q[part].reshape(len(keys), -1, q.shape[2])
        found = attend(*(grouped, keys.to(q.dtype), values.to(q.dtype), mask.flatten(0, 1)), scale)
        out[part] = found.view(-1, *q.shape[1:])
    return out if value_scale == 1.0 else out.mul_(value_scale)


def best_runs(
    scores: torch.Tensor, piece: SparsePiece, queries: SparseQueries, block_size: int
) -> torch.Tensor:
    """Runs [n, H, C] of the blocks with the highest scores [n, H, blocks], for a chunk of queries;
    in the format of `BlockSelection.runs`."""
    positions, page_size = queries.positions[piece.start : piece.stop], queries.page_size
    own = (positions // block_size)[:, None, None].expand(-1, scores.shape[1], 1)
    scores.scatter_(2, own, float("inf"))
    blocks = highest_positions(scores.flatten(0, 1), queries.top_k // block_size)
    offsets = torch.arange(0, block_size, run_length(queries, block_size), device=scores.device)
    places = (blocks.clamp(min=0).unsqueeze(-1) * block_size + offsets).flatten(1)
    # A query's own block may end after the row's last page.
    columns = (places // page_size).clamp(max=piece.pages.shape[1] - 1)
    pages = piece.pages.gather(1, columns.view(len(piece.pages), -1)).view_as(places)
    cells = (pages * page_size + places % page_size).view(*blocks.shape, -1)
    cells = cells.masked_fill(blocks.unsqueeze(-1) < 0, -1)
    return cells.view(*scores.shape[:2], -1).int()


def run_length(queries: SparseQueries, block_size: int) -> int:
    """Number of tokens that are consecutive both in pages and in blocks."""
    return math.gcd(queries.page_size, block_size)


def selection_of(
    runs: list[torch.Tensor], queries: SparseQueries, block_size: int
) -> BlockSelection:
    """The selection that consists of the runs of all chunks of queries."""
    return BlockSelection(
        runs=torch.cat(runs),
        hidden=block_size - 1 - queries.positions % block_size,
        length=run_length(queries, block_size),
    )


def _products(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Dot products [n, L] of queries [n, D] with keys [L, D]."""
    return q @ keys.T


__all__ = ["BlockSelection", "attend_to_blocks", "select_blocks"]
