"""Splits and pads the rows of a step for a graph, which has a fixed number of rows. Columns are as
in `Batch.rows`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from worker.rank.tables import DeviceTables
from worker.rank.transfer import IntArray


class GraphSize(NamedTuple):
    """Size of the graph on which a step runs."""

    rows: int | None
    """Number of rows; None for an eager step."""
    tokens: int
    """Number of tokens if the rows may have any length; otherwise 0."""
    has_adapters: bool = False
    """Whether the graph supports adapters even if no token has one."""


def split_blocks(table: IntArray, block_size: int) -> IntArray:
    """Splits rows [R, 4] of several blocks into rows of one block each, none of which samples.

    The result is the same as for the whole row: a layer stores the keys of all tokens before any
    query reads them, so a block attends to the earlier blocks of the same pass.
    """
    slots, starts, lengths, _ = table.T
    counts = lengths // block_size
    blocks = np.zeros((int(counts.sum()), 4), dtype=np.int64)
    blocks[:, 0] = np.repeat(slots, counts)
    first = np.repeat(starts - block_size * (np.cumsum(counts) - counts), counts)
    blocks[:, 1] = first + block_size * np.arange(len(blocks))
    blocks[:, 2] = block_size
    return blocks


def pad_rows(table: IntArray, size: int, num_tokens: int, tables: DeviceTables) -> IntArray:
    """Pads rows [R, 4] to `size` with dummy rows that sample nothing. A dummy row has one token (or
    block); with `num_tokens`, the missing tokens are distributed evenly over the dummy rows."""
    count = size - len(table)
    padding = np.zeros((count, 4), dtype=np.int64)
    padding[:, 0] = tables.dummy_slot
    padding[:, 2] = tables.block_size
    if num_tokens:
        missing = num_tokens - int(table[:, 2].sum())
        assert 0 <= missing <= count * tables.max_model_len, f"{missing} tokens in {count} rows"
        if count:
            padding[:, 2] = missing // count
            padding[: missing % count, 2] += 1
    return np.concatenate((table, padding))
