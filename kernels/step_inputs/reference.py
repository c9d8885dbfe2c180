"""Torch preparation of a step: it may wait for the device, and serves to check the kernels."""

from __future__ import annotations

import torch

from kernels.step_inputs.base import StepTensors


def write_table_rows_(
    token_pool: torch.Tensor,
    page_table: torch.Tensor,
    segments: torch.Tensor,
    values: torch.Tensor,
    longest: int,
) -> None:
    """One slice after another."""
    tables = (token_pool.view(-1), page_table.view(-1))
    for table, cell, first, length in segments.tolist():
        assert length <= longest, f"a run of {length} values is longer than {longest}"
        tables[table][cell : cell + length] = values[first : first + length]


def gather_step_inputs(
    token_pool: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    query_start: torch.Tensor,
    longest_query: int,
    num_pages: int,
    page_size: int,
    out: StepTensors,
) -> None:
    """Indexed reads."""
    lengths = query_start.diff()
    assert int(lengths.max()) <= longest_query, "a row has more tokens than the longest"
    num_tokens, num_rows = int(query_start[-1]), len(slots)
    token_slots = slots.repeat_interleave(lengths)
    first = (starts - query_start[:-1]).repeat_interleave(lengths)
    positions = torch.arange(num_tokens, device=slots.device) + first
    pages = page_table[token_slots, positions // page_size].long()
    out.input_ids[:num_tokens] = token_pool[token_slots, positions]
    out.positions[:num_tokens] = positions
    out.slot_mapping[:num_tokens] = pages * page_size + positions % page_size
    out.page_rows[:num_rows, :num_pages] = page_table[slots, :num_pages]
    out.seq_lens[:num_rows] = (starts + lengths).int()
