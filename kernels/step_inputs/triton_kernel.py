"""Triton step inputs: one launch writes table entries, one gathers inputs."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.registry import implements
from kernels.step_inputs import StepRows, StepTensors, gather_step_inputs, write_table_rows_
from kernels.tiles import cdiv

_BLOCK = 512


@implements(write_table_rows_, "triton")
def launch_write_table_rows(
    token_pool: torch.Tensor,
    page_table: torch.Tensor,
    segments: torch.Tensor,
    values: torch.Tensor,
    *,
    longest: int,
) -> None:
    """Launches a grid of (segments, blocks of the longest segment)."""
    assert token_pool.is_contiguous(), "cells count row after row"
    assert page_table.is_contiguous(), "cells count row after row"
    if segments.shape[0] and longest:
        _write_kernel[(segments.shape[0], cdiv(longest, _BLOCK))](
            token_pool, page_table, segments, values, BLOCK=_BLOCK, num_warps=2
        )


@implements(gather_step_inputs, "triton")
def launch_gather_step_inputs(
    token_pool: torch.Tensor, page_table: torch.Tensor, rows: StepRows
) -> StepTensors:
    """Launches a grid of (rows, blocks of tokens and of pages)."""
    out = StepTensors.allocate(rows)
    num_rows = len(rows.slots)
    num_blocks = cdiv(max(rows.longest_query, rows.num_pages), _BLOCK)
    if num_rows and num_blocks:
        _gather_kernel[(num_rows, num_blocks)](
            token_pool, page_table, rows.slots, rows.starts, rows.query_start,
            out.input_ids, out.positions, out.slot_mapping, out.page_rows, out.seq_lens,
            token_pool.stride(0), page_table.stride(0), out.page_rows.stride(0), rows.num_pages,
            PAGE_SIZE=rows.page_size, BLOCK=_BLOCK, num_warps=2,
        )  # fmt: skip
    return out


@dependent_kernel(do_not_specialize_on_alignment=["segment_ptr", "value_ptr"])
def _write_kernel(token_ptr, page_ptr, segment_ptr, value_ptr, BLOCK: tl.constexpr):
    wait_for_previous_kernel()
    segment = segment_ptr + tl.program_id(0) * 4
    cell = tl.load(segment + 1)
    first = tl.load(segment + 2)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < tl.load(segment + 3)
    value = tl.load(value_ptr + first + offset, mask=inside)
    if tl.load(segment) == 0:
        tl.store(token_ptr + cell + offset, value, mask=inside)
    else:
        tl.store(page_ptr + cell + offset, value, mask=inside)


@dependent_kernel(
    do_not_specialize=["num_pages", "page_row_stride"],
    do_not_specialize_on_alignment=["slot_ptr", "start_ptr", "query_start_ptr"],
)
def _gather_kernel(
    token_ptr, page_ptr, slot_ptr, start_ptr, query_start_ptr,
    input_id_ptr, position_ptr, slot_mapping_ptr, page_row_ptr, seq_len_ptr,
    token_stride, page_stride, page_row_stride, num_pages,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    start = tl.load(start_ptr + row)
    first = tl.load(query_start_ptr + row)
    length = tl.load(query_start_ptr + row + 1) - first
    if tl.program_id(1) == 0:
        tl.store(seq_len_ptr + row, (start + length).to(tl.int32))
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)

    inside = offset < length
    position = start + offset
    token = tl.load(token_ptr + slot * token_stride + position, mask=inside)
    page = tl.load(page_ptr + slot * page_stride + position // PAGE_SIZE, mask=inside, other=0)
    tl.store(input_id_ptr + first + offset, token, mask=inside)
    tl.store(position_ptr + first + offset, position, mask=inside)
    slots = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
    tl.store(slot_mapping_ptr + first + offset, slots, mask=inside)

    is_page = offset < num_pages
    pages = tl.load(page_ptr + slot * page_stride + offset, mask=is_page)
    tl.store(page_row_ptr + row * page_row_stride + offset, pages, mask=is_page)
