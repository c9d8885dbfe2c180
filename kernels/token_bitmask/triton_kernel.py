"""Triton token bitmask: reads the bits and only writes logits of forbidden tokens."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.registry import implements
from kernels.tiles import cdiv
from kernels.token_bitmask import apply_token_bitmask

_BLOCK = 4096


@implements(apply_token_bitmask, "triton")
def launch_token_bitmask(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    rows: torch.Tensor | None = None,
    *,
    mask_rows: torch.Tensor | None = None,
) -> None:
    """Launches a grid of (masked rows, blocks of the vocabulary)."""
    assert logits.stride(1) == 1, "a row's logits must lie side by side"
    assert bitmask.dtype == torch.int32, f"a token mask is int32, got {bitmask.dtype}"
    assert bitmask.stride(1) == 1, "a row's mask must lie side by side"
    vocab_size = logits.shape[1]
    given = rows if rows is not None else mask_rows
    num_rows = bitmask.shape[0] if given is None else given.shape[0]
    if num_rows == 0:
        return
    _bitmask_kernel[(num_rows, cdiv(vocab_size, _BLOCK))](
        logits, bitmask, bitmask if rows is None else rows,
        bitmask if mask_rows is None else mask_rows,
        vocab_size, logits.stride(0), bitmask.stride(0),
        HAS_ROWS=rows is not None, HAS_MASK_ROWS=mask_rows is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


@dependent_kernel(do_not_specialize_on_alignment=["bitmask_ptr", "row_ptr", "mask_row_ptr"])
def _bitmask_kernel(
    logits_ptr, bitmask_ptr, row_ptr, mask_row_ptr, vocab_size, row_stride, mask_stride,
    HAS_ROWS: tl.constexpr, HAS_MASK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    mask_row = row
    if HAS_MASK_ROWS:
        mask_row = tl.load(mask_row_ptr + row)
    if HAS_ROWS:
        row = tl.load(row_ptr + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    word = tl.load(bitmask_ptr + mask_row * mask_stride + column // 32, mask=inside, other=-1)
    banned = inside & (((word >> (column % 32)) & 1) == 0)
    nothing = tl.full((BLOCK,), float("-inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * row_stride + column, nothing, mask=banned)
