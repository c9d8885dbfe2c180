"""What the attention layers of one step share, computed once per step.

The tensors alone are enough for the Triton kernels. For the torch path the metadata also holds a
plan: which pages to gather, which rows to compute together, which positions to mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.attention.base import AttentionBackend, AttentionStep, CapturableBackend
from kernels.attention.torch_plan import (
    DecodeGroup,
    ExtendPiece,
    plan_decode_groups,
    plan_extend_pieces,
)
from kernels.attention.torch_plan_invariant import (
    InvariantPlan,
    plan_invariant_decode,
    plan_invariant_extend,
)
from kernels.registry import registry


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeMetadata:
    """One query per row. Made by `prepare_decode`."""

    page_table: torch.Tensor
    """[B, P] int32, page numbers in the order of positions; entries past a row's end are valid."""
    seq_lens: torch.Tensor
    """[B] int32: positions that a row attends to."""
    max_seq_len: int
    page_size: int
    batch_invariant: bool
    groups: tuple[DecodeGroup, ...] = ()
    """Torch plan; empty for Triton."""
    invariant_plan: InvariantPlan | None = None
    """Torch plan where batch_invariant."""
    step: AttentionStep | None = None
    """Where another library attends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtendMetadata:
    """Many queries per row, ragged. Made by `prepare_extend`."""

    page_table: torch.Tensor
    """[B, P] int32, as in DecodeMetadata."""
    seq_lens: torch.Tensor
    """[B] int32: tokens in the cache, the new ones included."""
    query_start: torch.Tensor
    """[B + 1] int32: where a row's new tokens begin in [T]."""
    max_query_len: int
    max_seq_len: int
    page_size: int
    batch_invariant: bool
    query_rows: torch.Tensor | None = None
    """[T] int32: the row of each query; only for Triton where batch_invariant."""
    visible_lens: torch.Tensor | None = None
    """[T] int32: positions that each query sees; only for Triton where batch_invariant."""
    pieces: tuple[ExtendPiece, ...] = ()
    """Torch plan; empty for Triton."""
    invariant_plan: InvariantPlan | None = None
    """Torch plan where batch_invariant."""
    step: AttentionStep | None = None
    """Where another library attends."""
    block_size: int = 1
    """Positions of one block see each other; 1 is causal."""


def prepare_decode(
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    seq_lens_host: Sequence[int],
    page_size: int,
    batch_invariant: bool = False,
    backend: AttentionBackend | None = None,
    is_captured: bool = False,
) -> DecodeMetadata:
    """Describe a decode step: page_table [B, P] and seq_lens [B] int32 on the caches' device.

    `seq_lens_host` are the same lengths as host integers (launching never waits for the device).
    On CUDA they may be upper bounds, as a captured graph needs; on CPU, and for a `backend`, they
    must be exact, but for a step that `is_captured` in a graph: that is planned before each replay.
    """
    max_seq_len = max(seq_lens_host, default=0)
    _check_page_table(page_table, len(seq_lens_host), max_seq_len, page_size)
    groups: tuple[DecodeGroup, ...] = ()
    invariant_plan = step = None
    if backend is not None and is_captured:
        assert isinstance(backend, CapturableBackend), "its steps are launched one by one"
        step = backend.prepare_for_capture(page_table, page_size=page_size)
    elif backend is not None:
        step = backend.plan_decode(
            page_table, seq_lens, seq_lens_host=seq_lens_host, page_size=page_size
        )
    elif not registry.uses_triton(page_table):
        if batch_invariant:
            invariant_plan = plan_invariant_decode(page_table, seq_lens_host, page_size)
        else:
            groups = plan_decode_groups(page_table, seq_lens, seq_lens_host, page_size)
    return DecodeMetadata(
        page_table=page_table,
        seq_lens=seq_lens,
        max_seq_len=max_seq_len,
        page_size=page_size,
        batch_invariant=batch_invariant,
        groups=groups,
        invariant_plan=invariant_plan,
        step=step,
    )


def prepare_extend(
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    *,
    seq_lens_host: Sequence[int],
    query_lens_host: Sequence[int],
    page_size: int,
    batch_invariant: bool = False,
    backend: AttentionBackend | None = None,
    block_size: int = 1,
) -> ExtendMetadata:
    """Describe a step that extends B rows by `query_lens_host` new tokens each.

    `seq_lens` counts the new tokens too; `query_start` [B + 1] int32 are the running sums of the
    query lengths. The host sequences repeat the tensors' values; on CUDA `seq_lens_host` may be
    upper bounds, as a captured graph needs. A query sees all positions up to
    the end of its block, where blocks of `block_size` positions are counted from 0: rows must
    begin and end where blocks do.
    """
    assert len(query_lens_host) == len(seq_lens_host), "one query length per sequence length"
    assert all(0 < q <= s for q, s in zip(query_lens_host, seq_lens_host, strict=True)), (
        "a row extends by at least one token and holds at least its new tokens"
    )
    assert all(
        q % block_size == 0 == s % block_size
        for q, s in zip(query_lens_host, seq_lens_host, strict=True)
    ), f"rows are to consist of whole blocks of {block_size}"
    max_seq_len = max(seq_lens_host, default=0)
    _check_page_table(page_table, len(seq_lens_host), max_seq_len, page_size)
    pieces: tuple[ExtendPiece, ...] = ()
    invariant_plan = query_rows = visible_lens = step = None
    if backend is not None:
        assert block_size == 1, "other libraries attend causally"
        step = backend.plan_extend(
            page_table,
            seq_lens,
            query_start,
            seq_lens_host=seq_lens_host,
            query_lens_host=query_lens_host,
            page_size=page_size,
        )
    elif batch_invariant and registry.uses_triton(page_table):
        query_rows, visible_lens = _per_query(
            seq_lens, query_start, sum(query_lens_host), block_size
        )
    elif not registry.uses_triton(page_table):
        lengths = (seq_lens_host, query_lens_host)
        if batch_invariant:
            invariant_plan = plan_invariant_extend(page_table, *lengths, page_size, block_size)
        else:
            pieces = plan_extend_pieces(page_table, *lengths, page_size, block_size)
    return ExtendMetadata(
        page_table=page_table,
        seq_lens=seq_lens,
        query_start=query_start,
        max_query_len=max(query_lens_host, default=0),
        max_seq_len=max_seq_len,
        page_size=page_size,
        batch_invariant=batch_invariant,
        query_rows=query_rows,
        visible_lens=visible_lens,
        pieces=pieces,
        invariant_plan=invariant_plan,
        step=step,
        block_size=block_size,
    )


def _check_page_table(
    page_table: torch.Tensor, rows: int, max_seq_len: int, page_size: int
) -> None:
    assert page_table.shape[0] == rows, f"{page_table.shape[0]} page rows for {rows} sequences"
    room = page_table.shape[1] * page_size
    assert room >= max_seq_len, f"page table holds {room} tokens, a row has {max_seq_len}"


def _per_query(
    seq_lens: torch.Tensor, query_start: torch.Tensor, num_queries: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each query's row and number of visible positions, computed without waiting for the device."""
    ends = query_start[1:]
    rows = torch.repeat_interleave(
        torch.arange(seq_lens.shape[0], dtype=torch.int32, device=seq_lens.device),
        ends - query_start[:-1],
        output_size=num_queries,
    )
    # Counted back from the row's end: its last new token sees the whole row.
    index = torch.arange(num_queries, dtype=torch.int32, device=seq_lens.device)
    after = (ends - seq_lens).index_select(0, rows)
    position = index - after
    return rows, (position // block_size + 1) * block_size
