"""Triton token edits."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.tiles import cdiv
from kernels.token_edits import base
from kernels.token_edits.base import EditRows, TokenEdits

_BLOCK = 128

_NONE = tl.constexpr(base.NONE)


def apply_token_edits_(
    logits: torch.Tensor, edits: TokenEdits, rows: EditRows, token_pool: torch.Tensor
) -> None:
    """Launches a grid of (edited rows, blocks of edits)."""
    assert logits.dtype == torch.float32, f"edits take fp32 logits, got {logits.dtype}"
    assert logits.stride(1) == 1, "a row's logits must lie side by side"
    assert token_pool.is_contiguous(), "cells count row after row"
    num_edits, longest = edits.before.shape[1:]
    if rows.rows.shape[0]:
        _edit_kernel[(rows.rows.shape[0], cdiv(num_edits, _BLOCK))](
            logits, edits.tokens, edits.values, edits.before, token_pool,
            rows.rows, rows.slots, rows.cells, rows.num_output,
            logits.stride(0), num_edits, longest, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_edits", "longest"],
    do_not_specialize_on_alignment=["row_ptr", "slot_ptr", "cell_ptr", "num_output_ptr"],
)
def _edit_kernel(
    logits_ptr, token_ptr, value_ptr, before_ptr, pool_ptr,
    row_ptr, slot_ptr, cell_ptr, num_output_ptr,
    row_stride, num_edits, longest, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    edit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cell = tl.load(cell_ptr + index)
    num_output = tl.load(num_output_ptr + index)
    place = tl.load(slot_ptr + index) * num_edits + edit
    token = tl.load(token_ptr + place, mask=edit < num_edits, other=_NONE)
    fits = token != _NONE
    for column in range(0, longest):
        back = longest - column
        # Positions before the output load NONE - 1, which no token equals: only NONE matches.
        drawn = tl.load(pool_ptr + cell - back, mask=back <= num_output, other=_NONE - 1)
        before = tl.load(before_ptr + place * longest + column, mask=fits, other=_NONE)
        fits = fits & ((before == drawn) | (before == _NONE))
    value = tl.load(value_ptr + place, mask=fits, other=0.0)
    row = tl.load(row_ptr + index)
    tl.atomic_add(logits_ptr + row * row_stride + token, value, mask=fits, sem="relaxed")
