"""Step inputs: ops that write to the tables on the device, and that gather a step's tokens and
pages.

The references wait for the device, so on CUDA they are only used to test the kernels.
"""

from __future__ import annotations

import torch

from kernels.registry import op
from kernels.step_inputs.base import StepRows, StepTensors


@op
def write_table_rows_(
    token_pool: torch.Tensor,
    page_table: torch.Tensor,
    segments: torch.Tensor,
    values: torch.Tensor,
    *,
    longest: int,
) -> None:
    """Copies segments of values to the token pool and the page table. No cell may be written twice.

    Args:
        token_pool: int32 [slots, positions]: tokens of each request.
        page_table: int32 [slots, pages]: page ids of each request.
        segments: int64 [n, 4]: 0 for the token pool or 1 for the page table; first cell of the flat
            table; index of the first value; number of values.
        values: int32: values of all segments.
        longest: maximum number of values of a segment.
    """
    tables = (token_pool.view(-1), page_table.view(-1))
    for table, cell, first, length in segments.tolist():
        assert length <= longest, f"a run of {length} values is longer than {longest}"
        tables[table][cell : cell + length] = values[first : first + length]


@op
def gather_step_inputs(
    token_pool: torch.Tensor, page_table: torch.Tensor, rows: StepRows
) -> StepTensors:
    """Gathers the inputs of a step, from the tables and three integers per row.

    Args:
        token_pool: int32 [slots, positions]: tokens of each request.
        page_table: int32 [slots, pages]: page ids of each request.
        rows: rows of the step.
    """
    out = StepTensors.allocate(rows)
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
    return out


__all__ = ["StepRows", "StepTensors", "gather_step_inputs", "write_table_rows_"]
