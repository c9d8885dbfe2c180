"""Prompts of multi-head latent attention (MLA) in expanded form: when it saves work, and its plan.

    absorbed   queries in the latent space; all heads share the cached latents as keys and values
    expanded   keys and values of each head, computed from the cached latents

The absorbed form needs more operations per pair of a query and a key; the expanded form needs
additional operations per key. So rows with many queries are expanded, in chunks of keys that bound
the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from kernels.attention.base import AttentionMetadata
from kernels.attention.split import to_device

MIN_QUERIES = 128
"""Minimum number of queries of an expanded row: a tile of the Triton kernel."""
_PIECE_BYTES = 128 << 20
"""Maximum size, in bytes, of the keys and values that are expanded at a time."""
_MIN_KEYS = 128
"""Minimum number of keys per chunk, for models with very many heads."""


class Expansion(NamedTuple):
    """Sizes of a rank's attention heads."""

    num_heads: int
    """Number of heads of this rank."""
    latent_dim: int
    """Dimensions of the latents, from which keys and values are computed."""
    rotary_dim: int
    """Dimensions of queries and keys with rotary embedding; all heads share those of the keys."""
    plain_dim: int
    """Dimensions of queries and keys without rotary embedding."""
    value_dim: int
    """Dimensions of values."""
    itemsize: int
    """Bytes per element of an expanded key."""

    @property
    def width(self) -> int:
        """Elements per cached token in expanded form: the keys without their rotary part, and the
        values, of all heads."""
        return self.num_heads * (self.plain_dim + self.value_dim)

    @property
    def most_keys(self) -> int:
        """Maximum number of keys per chunk: 128 MiB, that is, 16,384 keys of 16 heads of 128 + 128
        dimensions in bf16, or 2,048 keys of 128 heads."""
        return max(_MIN_KEYS, _PIECE_BYTES // (self.width * self.itemsize))

    def saves_work(self, num_queries: int, seq_len: int) -> bool:
        """Whether a row needs fewer operations in expanded than in absorbed form.

        Per head, a pair of a query and a key takes 2 (latent + rotary + latent) operations in
        absorbed form, and 2 (plain + rotary + value) in expanded form. Expanding a key takes 2
        latent (plain + value) operations, as many as absorbing a query. So new tokens cost the same
        in both forms, and expanded form only adds operations for the prefix. For DeepSeek (512, 64,
        128 and 128) and a long prefix, the break-even point is at 171 queries.

        Args:
            num_queries: number of queries.
            seq_len: number of keys; the queries are at the last positions.
        """
        if num_queries < MIN_QUERIES:
            return False
        prefix = seq_len - num_queries
        pairs = num_queries * prefix + num_queries * (num_queries + 1) // 2
        saved_per_pair = 2 * self.latent_dim - self.plain_dim - self.value_dim
        return pairs * saved_per_pair > prefix * self.latent_dim * (self.plain_dim + self.value_dim)


class KeyPiece(NamedTuple):
    """Chunk of keys that are expanded together: all of one or several rows, or some of one row."""

    first_row: int
    last_row: int
    """Exclusive end of the chunk's rows [first_row, last_row)."""
    start: int
    stop: int
    """Exclusive end of the keys' positions [start, stop) in a row; for whole rows, `start` is 0 and
    `stop` an upper bound."""
    cells: torch.Tensor
    """[K] int64: cell (page * page_size + offset) of each key, row after row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpandedRows:
    """B rows of a step whose attention is in expanded form."""

    query_start: torch.Tensor
    """[B + 1] int32: offsets of the rows' queries."""
    seq_lens: torch.Tensor
    """[B] int32: number of keys of each row."""
    key_start: torch.Tensor
    """[B + 1] int32: offsets of the rows' keys among the keys of all rows."""
    query_lens_host: Sequence[int]
    """[B]: number of queries per row."""
    seq_lens_host: Sequence[int]
    """[B]: number of keys per row."""
    pieces: tuple[KeyPiece, ...]
    """Chunks of all keys, in order."""

    @property
    def has_parts(self) -> bool:
        """Whether the keys of any row are in several chunks."""
        return any(piece.start for piece in self.pieces)


def plan_expanded_rows(extend: AttentionMetadata, most_keys: int) -> ExpandedRows:
    """Plans rows whose exact lengths are known. Does not wait for the device.

    Args:
        extend: rows with causal attention.
        most_keys: maximum number of keys per chunk.
    """
    assert extend.query_start is not None, "decodes are absorbed"
    device, lengths = extend.page_table.device, extend.seq_lens_host
    starts = to_device([0, *accumulate(lengths)], device)
    pieces = (
        KeyPiece(first, last, start, stop, _cells(extend, starts, first, last, start, stop))
        for first, last, start, stop in _ranges(lengths, most_keys)
    )
    return ExpandedRows(
        query_start=extend.query_start,
        seq_lens=extend.seq_lens,
        key_start=starts.int(),
        query_lens_host=extend.query_lens_host,
        seq_lens_host=lengths,
        pieces=tuple(pieces),
    )


def _ranges(lengths: Sequence[int], most_keys: int) -> Iterator[tuple[int, int, int, int]]:
    """Rows and positions of each chunk: consecutive rows that fit together, and parts of longer
    ones."""
    first = count = 0
    for row, length in enumerate(lengths):
        if count + length > most_keys and row > first:
            yield first, row, 0, max(lengths[first:row])
            first, count = row, 0
        count += length
        if length > most_keys:
            bounds = [*range(0, length, most_keys), length]
            yield from ((row, row + 1, start, stop) for start, stop in pairwise(bounds))
            first, count = row + 1, 0
    if first < len(lengths):
        yield first, len(lengths), 0, max(lengths[first:])


def _cells(
    extend: AttentionMetadata, starts: torch.Tensor, first: int, last: int, start: int, stop: int
) -> torch.Tensor:
    """Cells of the keys of a chunk; `starts` are the offsets of all rows' keys."""
    device, size = starts.device, extend.page_size
    table = extend.page_table[first:last]
    if last - first == 1:
        position = torch.arange(start, stop, device=device)
        page = table[0].index_select(0, position // size)
    else:
        total = sum(extend.seq_lens_host[first:last])
        offsets = starts[first : last + 1] - starts[first]
        key = torch.arange(total, device=device)
        row = torch.bucketize(key, offsets[1:], right=True)
        position = key - offsets.index_select(0, row)
        page = table.flatten().index_select(0, row * table.shape[1] + position // size)
    return page.long() * size + position % size
