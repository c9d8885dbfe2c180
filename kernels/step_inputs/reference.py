"""Torch reference of step inputs; waits for the device, so it is only used to test kernels on
CUDA."""

from __future__ import annotations

import torch

from kernels.step_inputs.base import StepRows, StepTensors


def write_table_rows_(
    token_pool: torch.Tensor,
    page_table: torch.Tensor,
    segments: torch.Tensor,
    values: torch.Tensor,
    longest: int,
) -> None:
    """Copies one segment after another."""
    tables = (token_pool.view(-1), page_table.view(-1))
    for table, cell, first, length in segments.tolist():
        assert length <= longest, f"a run of {length} values is longer than {longest}"
        tables[table][cell : cell + length] = values[first : first + length]


def gather_step_inputs(
    token_pool: torch.Tensor, page_table: torch.Tensor, rows: StepRows, out: StepTensors
) -> None:
    """Gathers by indexed reads."""
    lengths = rows.query_start.diff()
    assert int(rows.query_start[-1]) == rows.num_tokens, "num_tokens must be exact"
    assert int(lengths.max()) <= rows.longest_query, "a row has more tokens than the longest"
    slots = rows.slots.repeat_interleave(lengths)
    first = (rows.starts - rows.query_start[:-1]).repeat_interleave(lengths)
    positions = torch.arange(rows.num_tokens, device=slots.device) + first
    pages = page_table[slots, positions // rows.page_size].long()
    out.input_ids.copy_(token_pool[slots, positions])
    out.positions.copy_(positions)
    out.slot_mapping.copy_(pages * rows.page_size + positions % rows.page_size)
    out.page_rows.copy_(page_table[rows.slots, : rows.num_pages])
    out.seq_lens.copy_(rows.starts + lengths)
