"""Separates some rows of a step's extends from the others, to compute them with another kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from kernels.attention.base import AttentionMetadata


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitExtends:
    """Extends, split into selected rows and all others; both keep the order of the rows."""

    selected: AttentionMetadata
    others: AttentionMetadata | None
    """All other rows; None if there are none."""
    tokens: torch.Tensor | None
    """[N] int64: indices of the selected rows' queries among those of the step; None if all are
    selected."""
    other_tokens: torch.Tensor | None
    """[M] int64: indices of all other queries; None if there are none."""


def split_extends(
    extend: AttentionMetadata, is_selected: Sequence[bool], num_before: int = 0
) -> SplitExtends | None:
    """Splits extends by row; None if no row is selected.

    Args:
        extend: rows whose numbers of queries are known on the host.
        is_selected: whether each row is selected.
        num_before: number of queries before the extends in the step; they belong to the others.
    """
    if not any(is_selected):
        return None
    if all(is_selected) and not num_before:
        return SplitExtends(selected=extend, others=None, tokens=None, other_tokens=None)
    device, first = extend.page_table.device, num_before
    selected, others, tokens = list[int](), list[int](), list[int]()
    other_tokens = list(range(num_before))
    for row, length in enumerate(extend.query_lens_host):
        rows, queries = (selected, tokens) if is_selected[row] else (others, other_tokens)
        rows.append(row)
        queries += range(first, first + length)
        first += length
    return SplitExtends(
        selected=_rows_of(extend, selected) if others else extend,
        others=_rows_of(extend, others) if others else None,
        tokens=to_device(tokens, device),
        other_tokens=to_device(other_tokens, device),
    )


def _rows_of(extend: AttentionMetadata, rows: Sequence[int]) -> AttentionMetadata:
    index = to_device(rows, extend.page_table.device)
    lengths = [extend.query_lens_host[row] for row in rows]
    starts = to_device([0, *accumulate(lengths)], extend.page_table.device)
    return replace(
        extend,
        page_table=extend.page_table.index_select(0, index),
        seq_lens=extend.seq_lens.index_select(0, index),
        seq_lens_host=[extend.seq_lens_host[row] for row in rows],
        query_start=starts.int(),
        query_lens_host=lengths,
    )


def to_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Copies integers to the device as int64, without waiting for it."""
    host = torch.tensor(values, dtype=torch.int64)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
