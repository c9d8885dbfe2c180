"""Queries that attend to a selection of the cached tokens, and the pages that contain their
keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class SparsePiece(NamedTuple):
    """Chunk of consecutive queries that are scored together: some of one row, or one of each of R
    rows."""

    start: int
    stop: int
    """Exclusive end of the chunk's queries [start, stop)."""
    pages: torch.Tensor
    """[R, P] int64: page ids of the rows."""
    length: int
    """Upper bound of the number of positions that any of the queries may attend to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseQueries:
    """The N queries of a step that attend to a selection of the tokens at or before them."""

    pieces: tuple[SparsePiece, ...]
    """Chunks of all queries, in order."""
    positions: torch.Tensor
    """[N] int64: positions of the queries."""
    top_k: int
    """Number of tokens to select for a query."""
    page_size: int
    """Tokens per page."""
