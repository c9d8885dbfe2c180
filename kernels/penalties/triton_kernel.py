"""Triton penalties: one pass over a slot's counts, which only writes logits of tokens with nonzero
counts.

It reads the vocabulary instead of the request's tokens, since threads would race on repeated
tokens.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.penalties import PenaltyRows, apply_penalties_, count_tokens_
from kernels.registry import implements
from kernels.tiles import cdiv

_BLOCK = 4096


@implements(apply_penalties_, "triton")
def launch_penalties(
    logits: torch.Tensor,
    rows: PenaltyRows,
    in_prompt: torch.Tensor,
    counts: torch.Tensor,
    token_pool: torch.Tensor,
) -> None:
    """Launches a grid of (penalized rows, blocks of the vocabulary); rows with neutral penalties
    return immediately."""
    assert logits.dtype == torch.float32, f"penalties need fp32 logits, got {logits.dtype}"
    assert logits.stride(1) == 1, "logits of a row must be contiguous"
    num_rows, vocab_size = rows.rows.shape[0], logits.shape[1]
    assert counts.shape == in_prompt.shape, "one count per flag"
    if num_rows == 0:
        return
    _penalty_kernel[(num_rows, cdiv(vocab_size, _BLOCK))](
        logits, in_prompt, counts, token_pool, rows.rows, rows.slots, rows.ends, rows.num_drafts,
        rows.frequency, rows.presence, rows.repetition,
        vocab_size, logits.stride(0), counts.stride(0), token_pool.stride(0),
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


@implements(count_tokens_, "triton")
def launch_count_tokens(counts: torch.Tensor, rows: PenaltyRows, tokens: torch.Tensor) -> None:
    """Launches one program per penalized row; several rows may have the same slot."""
    num_rows = rows.rows.shape[0]
    if num_rows:
        _count_kernel[(num_rows,)](
            counts, rows.rows, rows.slots, tokens, counts.stride(0), num_warps=1
        )


_PER_ROW = [
    *("row_ptr", "slot_ptr", "end_ptr", "draft_ptr"),
    *("frequency_ptr", "presence_ptr", "repetition_ptr"),
]


@dependent_kernel(do_not_specialize_on_alignment=_PER_ROW)
def _penalty_kernel(
    logits_ptr, in_prompt_ptr, counts_ptr, token_ptr, row_ptr, slot_ptr, end_ptr, draft_ptr,
    frequency_ptr, presence_ptr, repetition_ptr,
    vocab_size, row_stride, slot_stride, token_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    index = tl.program_id(0).to(tl.int64)
    frequency = tl.load(frequency_ptr + index)
    presence = tl.load(presence_ptr + index)
    repetition = tl.load(repetition_ptr + index)
    if (frequency != 0.0) | (presence != 0.0) | (repetition != 1.0):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocab_size
        slot = tl.load(slot_ptr + index)
        cell = slot * slot_stride + column
        count = tl.load(counts_ptr + cell, mask=inside, other=0)
        newest = token_ptr + slot * token_stride + tl.load(end_ptr + index) - 1
        for back in range(tl.load(draft_ptr + index)):
            count += (column == tl.load(newest - back)).to(tl.int32)
        in_prompt = tl.load(in_prompt_ptr + cell, mask=inside, other=0)
        in_output = count > 0
        seen = in_output | (in_prompt != 0)
        place = logits_ptr + tl.load(row_ptr + index) * row_stride + column
        found = tl.load(place, mask=seen, other=0.0)
        found = tl.where(found > 0, tl.div_rn(found, repetition), found * repetition)
        found -= count.to(tl.float32) * frequency
        found -= tl.where(in_output, presence, 0.0)
        tl.store(place, found, mask=seen)


@dependent_kernel(do_not_specialize_on_alignment=["row_ptr", "slot_ptr", "token_ptr"])
def _count_kernel(counts_ptr, row_ptr, slot_ptr, token_ptr, slot_stride):
    wait_for_previous_kernel()
    index = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + tl.load(row_ptr + index))
    cell = counts_ptr + tl.load(slot_ptr + index) * slot_stride + token
    # Several rows may have the same slot.
    tl.atomic_add(cell, 1, sem="relaxed")
