"""DeepSeek Sparse Attention: a query selects tokens by their index keys, and attends to the latents
of these tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.qk_norm_rope_store.reference import rotate_heads, write_cells
from kernels.registry import op
from kernels.sparse_attention.base import SparsePiece, SparseQueries
from kernels.sparse_attention.invariant import attend_invariantly, invariant_scores

_MAX_PRODUCTS = 1 << 24
"""Maximum number of dot products of queries and keys that are computed at a time: 64 MiB in fp32.
"""
_MAX_GATHERED = 1 << 24
"""Maximum number of latent elements that are gathered at a time: 64 MiB in fp32."""


@op
def store_index_keys(
    keys: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
) -> None:
    """Applies rotary embedding to the index keys of a step's tokens and writes them to the cache.

    Args:
        keys: [T, D]: index keys; undefined afterwards.
        cache: [num_pages, page_size, 1, D], contiguous, in the dtype of the keys.
        slot_mapping: int64 [T], as in `qk_norm_rope_store`.
        positions: int64 [T]: positions of the tokens.
        cos_sin_cache: fp32 [positions, R]: cosines in the first half of each row, sines in the
            second, for the first R dimensions of a key in NeoX layout (two halves).
    """
    rotate_heads(keys.unsqueeze(1), positions, cos_sin_cache)
    write_cells(cache.view(-1, keys.shape[1]), slot_mapping, keys, 1.0)


@op
def select_tokens(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    queries: SparseQueries,
    *,
    cos_sin_cache: torch.Tensor,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Selects, for each query, the tokens at or before it with the highest scores.

    The score of a token with index key k is the sum over heads of weight * relu(q · k), in fp32,
    after rotary embedding of q. Ties select the first positions.

    Args:
        q: [N, H, D]: index queries; undefined afterwards.
        weights: fp32 [N, H]: weight of each head's scores.
        cache: [num_pages, page_size, 1, D]: index keys, including those of the step's tokens.
        queries: pages and positions of the queries.
        cos_sin_cache: as in `store_index_keys`.
        batch_invariant: whether a query's scores must be bitwise independent of other queries.

    Returns:
        int32 [N, top_k]: cells (page * page_size + offset) in the order of their positions, padded
        with -1 if fewer tokens are visible.
    """
    rotate_heads(q, queries.positions, cos_sin_cache)
    cells = torch.empty(len(q), queries.top_k, dtype=torch.int32, device=q.device)
    score = invariant_scores if batch_invariant else _scores_of_row
    for piece in queries.pieces:
        part = slice(piece.start, piece.stop)
        scores = _scores(q[part], weights[part], cache, piece, score)
        places = torch.arange(piece.length, device=q.device)
        hidden = places > queries.positions[part].unsqueeze(1)
        cells[part] = best_cells(scores.masked_fill_(hidden, float("-inf")), piece, queries)
    return cells


@op
def attend_to_cells(
    q: torch.Tensor,
    cache: torch.Tensor,
    cells: torch.Tensor,
    value_dim: int,
    *,
    scale: float,
    value_scale: float = 1.0,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Computes the attention of each query over its selected latents, whose leading dimensions are
    the values: [N, H, value_dim].

    Args:
        q: [N, H, D]: queries.
        cache: [num_pages, page_size, 1, D]: latents, in the dtype of q or in FP8 (e4m3).
        cells: int32 [N, top_k] from `select_tokens`, at least one per query.
        value_dim: number of leading dimensions of D that are the values.
        scale: factor by which scores are multiplied, including the scale of an FP8 cache.
        value_scale: scale of values in an FP8 cache, by which the result is multiplied.
        batch_invariant: whether a query's result must be bitwise independent of other queries.
    """
    out = q.new_empty(*q.shape[:2], value_dim)
    latents = cache.view(-1, cache.shape[3])
    step = max(1, _MAX_GATHERED // (cells.shape[1] * cache.shape[3]))
    attend = attend_invariantly if batch_invariant else attend_to_own_keys
    for start in range(0, len(q), step):
        part = slice(start, start + step)
        chosen = cells[part]
        keys = latents.index_select(0, chosen.clamp(min=0).flatten()).to(q.dtype)
        mask = torch.zeros(chosen.shape, dtype=q.dtype, device=q.device)
        mask.masked_fill_(chosen < 0, float("-inf"))
        keys = keys.view(*chosen.shape, -1)
        found = attend(q[part], keys, keys, mask, scale)
        out[part] = found[..., :value_dim]
    return out if value_scale == 1.0 else out.mul_(value_scale)


def best_cells(scores: torch.Tensor, piece: SparsePiece, queries: SparseQueries) -> torch.Tensor:
    """Cells [n, top_k] of the highest scores [n, length] of a chunk, in the order of their
    positions, padded with -1; scores of -inf are excluded."""
    positions = highest_positions(scores, queries.top_k).reshape(len(piece.pages), -1)
    known, page_size = positions.clamp(min=0), queries.page_size
    cells = piece.pages.gather(1, known // page_size) * page_size + known % page_size
    return cells.masked_fill_(positions < 0, -1).view(len(scores), -1).int()


def _scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    piece: SparsePiece,
    score: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Scores [n, length], in fp32, of a chunk's queries [n, H, D] with weights [n, H]; `score`
    computes the scores of one row."""
    scores = weights.new_empty(len(q), piece.length)
    count = len(q) // len(piece.pages)
    step = max(1, _MAX_PRODUCTS // (q.shape[1] * piece.length))
    for row, pages in enumerate(piece.pages):
        keys = cache.index_select(0, pages).flatten(0, 2)[: piece.length].float()
        for start in range(row * count, (row + 1) * count, step):
            part = slice(start, min(start + step, (row + 1) * count))
            scores[part] = score(q[part].float(), weights[part], keys)
    return scores


def _scores_of_row(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scores [n, L] of a row's queries [n, H, D] with weights [n, H], and its keys [L, D]."""
    products = (q.flatten(0, 1) @ keys.T).relu_().view(*q.shape[:2], -1)
    return (weights.unsqueeze(1) @ products).squeeze(1)


def highest_positions(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Positions [n, count] of the highest scores [n, L], ascending, padded with -1; scores of -inf
    are excluded."""
    length = scores.shape[1]
    visible = scores > float("-inf")
    chosen = visible
    if length > count:
        least = scores.topk(count).values[:, -1:]
        above = scores > least
        level = (scores == least) & visible
        room = count - above.sum(-1, keepdim=True)
        chosen = above | (level & (level.cumsum(-1) <= room))
    # Each chosen position is written to its rank among the chosen ones, the others to a column that
    # is dropped.
    ranks = torch.where(chosen, chosen.cumsum(-1) - 1, count)
    positions = torch.arange(length, device=scores.device).expand_as(scores)
    found = torch.full((len(scores), count + 1), -1, device=scores.device)
    return found.scatter_(1, ranks, positions)[:, :count]


def attend_to_own_keys(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of q [n, H, D] to keys [n, K, D] and values [n, K, Dv], with a mask [n, K] that
    is added to scores."""
    return scaled_dot_product_attention(
        *(q.unsqueeze(1), keys.unsqueeze(1), values.unsqueeze(1)),
        attn_mask=mask[:, None, None],
        scale=scale,
    ).squeeze(1)


__all__ = [
    "SparsePiece",
    "SparseQueries",
    "attend_to_cells",
    "attend_to_own_keys",
    "highest_positions",
    "select_tokens",
    "store_index_keys",
]
