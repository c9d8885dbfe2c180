"""Triton token edits: one program per block of a row's biases, and one per word."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.registry import implements
from kernels.tiles import cdiv
from kernels.token_edits import EditRows, TokenEdits, apply_token_edits_

_BLOCK = 128


@implements(apply_token_edits_, "triton")
def launch_token_edits(
    logits: torch.Tensor, edits: TokenEdits, rows: EditRows, token_pool: torch.Tensor
) -> None:
    """Launches a grid of (edited rows, blocks of biases and words); programs beyond a row's own
    biases and words return immediately."""
    assert logits.dtype == torch.float32, f"edits take fp32 logits, got {logits.dtype}"
    assert logits.stride(1) == 1, "a row's logits must lie side by side"
    assert token_pool.is_contiguous(), "cells count row after row"
    num_blocks = cdiv(rows.most_biases, _BLOCK)
    if rows.rows.shape[0]:
        _edit_kernel[(rows.rows.shape[0], num_blocks + rows.most_words)](
            logits, edits.bias_tokens, edits.biases, edits.words, edits.word_ends, token_pool,
            rows.rows, rows.slots, rows.cells, rows.num_output, rows.num_biases, rows.num_words,
            logits.stride(0), edits.biases.shape[1], edits.words.shape[1],
            edits.word_ends.shape[1], num_blocks, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


_PER_ROW = [
    *("row_ptr", "slot_ptr", "cell_ptr"),
    *("num_output_ptr", "num_biases_ptr", "num_words_ptr"),
]


@dependent_kernel(
    do_not_specialize=["bias_stride", "word_stride", "end_stride", "num_blocks"],
    do_not_specialize_on_alignment=_PER_ROW,
)
def _edit_kernel(
    logits_ptr, bias_token_ptr, bias_ptr, word_ptr, end_ptr, pool_ptr,
    row_ptr, slot_ptr, cell_ptr, num_output_ptr, num_biases_ptr, num_words_ptr,
    row_stride, bias_stride, word_stride, end_stride, num_blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    index = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slot_ptr + index)
    place = logits_ptr + tl.load(row_ptr + index) * row_stride
    if part < num_blocks:
        number = part * BLOCK + tl.arange(0, BLOCK)
        inside = number < tl.load(num_biases_ptr + index)
        cell = slot * bias_stride + number
        token = tl.load(bias_token_ptr + cell, mask=inside, other=0)
        value = tl.load(bias_ptr + cell, mask=inside, other=0.0)
        # A word's program may ban the same token.
        tl.atomic_add(place + token, value, mask=inside, sem="relaxed")
    else:
        word = part - num_blocks
        if word < tl.load(num_words_ptr + index):
            ends = end_ptr + slot * end_stride + word
            start = tl.load(ends - 1, mask=word > 0, other=0)
            num_before = tl.load(ends) - start - 1
            if num_before <= tl.load(num_output_ptr + index):
                tokens = word_ptr + slot * word_stride + start
                latest = pool_ptr + tl.load(cell_ptr + index) - num_before
                num_different = 0
                for first in range(0, num_before, BLOCK):
                    position = first + tl.arange(0, BLOCK)
                    inside = position < num_before
                    wanted = tl.load(tokens + position, mask=inside, other=0)
                    sampled = tl.load(latest + position, mask=inside, other=0)
                    num_different += tl.sum((wanted != sampled).to(tl.int32))
                if num_different == 0:
                    banned = tl.load(tokens + num_before)
                    tl.atomic_add(place + banned, float("-inf"), sem="relaxed")
