"""Triton prompt lookup: one program per row, which reads the row's tokens in blocks."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.draft_ngrams import NgramLookup, draft_ngrams
from kernels.registry import implements
from kernels.tiles import next_power_of_2

_BLOCK = 1024
_LEAST_COUNT = 16
"""Minimum number of drafts for which a kernel is compiled; fewer use the same binary."""


@implements(draft_ngrams, "triton")
def launch_draft_ngrams(
    token_pool: torch.Tensor, lookup: NgramLookup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches one program per row."""
    shape = (len(lookup.slots), lookup.count)
    drafts = torch.empty(shape, dtype=torch.int32, device=token_pool.device)
    lengths = torch.empty(shape[0], dtype=torch.int64, device=token_pool.device)
    if drafts.numel():
        _draft_kernel[shape[:1]](
            token_pool, lookup.slots, lookup.newest, drafts, lengths, token_pool.stride(0),
            lookup.count, lookup.num_tokens, SHORTEST=lookup.shortest, LONGEST=lookup.longest,
            COUNT=next_power_of_2(max(_LEAST_COUNT, lookup.count)), BLOCK=_BLOCK,
            num_warps=4,
        )  # fmt: skip
    return drafts, lengths


@dependent_kernel(
    do_not_specialize=["count", "num_tokens"],
    do_not_specialize_on_alignment=["slot_ptr", "newest_ptr"],
)
def _draft_kernel(
    token_ptr, slot_ptr, newest_ptr, draft_ptr, length_ptr, token_stride, count, num_tokens,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    tokens = token_ptr + tl.load(slot_ptr + row) * token_stride
    newest = tl.load(newest_ptr + row)
    scale = tl.full((), 0, tl.int64) + num_tokens
    best = tl.full((), 0, tl.int64)
    for start in range(0, num_tokens, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        is_alike = place <= newest
        length = tl.zeros((BLOCK,), dtype=tl.int64)
        for size in range(1, LONGEST + 1):
            inside = is_alike & (place >= size)
            last = tl.load(tokens + newest + 1 - size, mask=newest + 1 >= size, other=-1)
            token = tl.load(tokens + place - size, mask=inside, other=-2)
            is_alike = inside & (token == last)
            length += is_alike.to(tl.int64)
        scores = tl.where(length >= SHORTEST, length * scale + place, 0)
        best = tl.maximum(best, tl.max(scores, axis=0))
    place = tl.where(best > 0, best % scale, newest)
    draft = tl.arange(0, COUNT)
    token = tl.load(tokens + place + draft % (newest + 1 - place), mask=draft < count)
    tl.store(length_ptr + row, best // scale)
    tl.store(draft_ptr + row * count + draft, token, mask=draft < count)
