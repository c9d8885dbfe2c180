"""Plan of sparse attention: which queries of a step attend to a selection of tokens.

A query with at most `top_k` visible tokens attends to all of them, so it uses regular attention. A
row that grows beyond this length within a step is split:

    positions   0 ... top_k - 1   top_k ... end - 1
                    others          SparseQueries
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch

from kernels.attention.base import AttentionMetadata
from kernels.attention.split import to_device
from kernels.sparse_attention.base import SparsePiece, SparseQueries

_MAX_PAIRS = 1 << 22
"""Maximum number of pairs of queries and keys per chunk, which bounds the memory for selecting
tokens: about 30 bytes per pair."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRows:
    """The rows of a step, split by the number of tokens to which queries attend."""

    queries: SparseQueries
    tokens: torch.Tensor | None
    """[N] int64: indices of `queries` among the step's tokens; None if `queries` has all tokens."""
    others: torch.Tensor | None
    """[M] int64: indices of the other queries; None if there are none."""
    decode: AttentionMetadata | None
    """Decode rows of the other queries; None if there are none."""
    extend: AttentionMetadata | None
    """Longer rows of the other queries; None if there are none."""


class _Row(NamedTuple):
    part: AttentionMetadata
    number: int
    """Index of the row among the decodes or among the extends."""
    first: int
    """Index of the row's first query among the step's tokens."""
    length: int
    """Number of queries."""
    end: int
    """Upper bound of the row's sequence length."""
    num_others: int
    """Number of leading queries that attend to all tokens before them."""

    @property
    def others(self) -> range:
        """Indices, among the step's tokens, of the leading queries that attend to all tokens before
        them."""
        return range(self.first, self.first + self.num_others)

    @property
    def selecting(self) -> range:
        """Indices, among the step's tokens, of the queries that select tokens."""
        return range(self.first + self.num_others, self.first + self.length)


def split_rows(
    decode: AttentionMetadata | None,
    extend: AttentionMetadata | None,
    positions: torch.Tensor,
    top_k: int,
) -> SplitRows | None:
    """Splits the rows of an eager step; None if all queries attend to all tokens before them.

    Lengths on the host may be upper bounds: a query with fewer tokens selects all of them.

    Args:
        decode: rows of one token, which come first; None if there are none.
        extend: longer rows; None if there are none.
        positions: [T] int64: positions of the step's tokens.
        top_k: number of tokens to select for a query.
    """
    parts = [part for part in (decode, extend) if part is not None]
    if max(part.max_seq_len for part in parts) <= top_k:
        return None
    rows = list(_rows(parts, top_k))
    device = positions.device
    tokens = to_device([token for row in rows for token in row.selecting], device)
    others = to_device([token for row in rows for token in row.others], device)
    has_others = len(others) > 0
    return SplitRows(
        queries=SparseQueries(
            pieces=tuple(_pieces(rows)),
            positions=positions.index_select(0, tokens) if has_others else positions,
            top_k=top_k,
            page_size=parts[0].page_size,
        ),
        tokens=tokens if has_others else None,
        others=others if has_others else None,
        decode=None if decode is None else _others(decode, rows),
        extend=None if extend is None else _others(extend, rows),
    )


def _rows(parts: Sequence[AttentionMetadata], top_k: int) -> Iterator[_Row]:
    first = 0
    for part in parts:
        is_decode = part.query_start is None
        lengths = [1] * len(part.seq_lens_host) if is_decode else part.query_lens_host
        for number, (length, end) in enumerate(zip(lengths, part.seq_lens_host, strict=True)):
            num_others = min(max(top_k - (end - length), 0), length)
            yield _Row(part, number, first, length, end, num_others)
            first += length


def _others(part: AttentionMetadata, rows: Sequence[_Row]) -> AttentionMetadata | None:
    """The decodes or extends without the queries that select tokens; None if no row is left."""
    kept = [row for row in rows if row.part is part and row.num_others]
    if not kept:
        return None
    device = part.page_table.device
    index = to_device([row.number for row in kept], device)
    cut = [len(row.selecting) for row in kept]
    lengths = [row.num_others for row in kept]
    query_start = part.query_start
    if query_start is not None:
        ends = to_device([0, *accumulate(lengths)], device)
        query_start = ends.to(query_start.dtype)
    seq_lens = part.seq_lens.index_select(0, index)
    return replace(
        part,
        page_table=part.page_table.index_select(0, index),
        seq_lens=seq_lens - to_device(cut, device).to(seq_lens.dtype),
        seq_lens_host=[row.end - less for row, less in zip(kept, cut, strict=True)],
        query_start=query_start,
        query_lens_host=() if query_start is None else lengths,
    )


def _pieces(rows: Sequence[_Row]) -> Iterator[SparsePiece]:
    """Chunks of the queries that select tokens: consecutive decodes together, other rows alone."""
    start = longest = 0
    decodes: list[_Row] = []
    for row in rows:
        if not row.selecting:
            continue
        is_decode = row.part.query_start is None
        if decodes and not (is_decode and (len(decodes) + 1) * max(longest, row.end) <= _MAX_PAIRS):
            yield _piece(decodes, start, len(decodes), longest)
            start, longest, decodes = start + len(decodes), 0, []
        if is_decode:
            decodes.append(row)
            longest = max(longest, row.end)
            continue
        count, step = len(row.selecting), max(1, _MAX_PAIRS // row.end)
        for first in range(0, count, step):
            size = min(step, count - first)
            yield _piece([row], start, size, row.end - count + first + size)
            start += size
    if decodes:
        yield _piece(decodes, start, len(decodes), longest)


def _piece(rows: Sequence[_Row], start: int, count: int, length: int) -> SparsePiece:
    part = rows[0].part
    columns = -(-length // part.page_size)
    index = to_device([row.number for row in rows], part.page_table.device)
    pages = part.page_table.index_select(0, index)[:, :columns].long()
    return SparsePiece(start, start + count, pages, length)
