"""Triton token scores: two passes over the logits, which store nothing per token of the vocabulary.

The first pass finds the largest logit of each chunk and counts logits that are at least the
token's; the second one sums weights relative to the row's largest logit.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.registry import implements
from kernels.sample_tokens import thresholds
from kernels.tiles import cdiv, next_power_of_2
from kernels.token_scores import TokenScores, token_scores

_CHUNK = 4096

_WEIGHT_SCALE = tl.constexpr(2.0**thresholds.WEIGHT_BITS)


@implements(token_scores, "triton")
def launch_token_scores(logits: torch.Tensor, tokens: torch.Tensor) -> TokenScores:
    """Launches the two passes, each with a grid of (rows, chunks of the vocabulary)."""
    assert logits.dtype == torch.float32, f"scores take fp32 logits, got {logits.dtype}"
    assert logits.stride(1) == 1, "a row's logits must lie side by side"
    rows, vocab_size = logits.shape
    device = logits.device
    num_chunks = cdiv(vocab_size, _CHUNK)
    token_logits, best = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    weight, rank = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
    chunk_best = torch.empty(rows, num_chunks, dtype=torch.float32, device=device)
    if rows:
        shape = (vocab_size, logits.stride(0), num_chunks)
        _rank_kernel[(rows, num_chunks)](
            logits, tokens, token_logits, rank, chunk_best, *shape, CHUNK=_CHUNK, num_warps=8
        )
        _weigh_kernel[(rows, num_chunks)](
            logits, chunk_best, best, weight, *shape,
            CHUNK=_CHUNK, CHUNKS_BLOCK=next_power_of_2(num_chunks), num_warps=8,
        )  # fmt: skip
    return TokenScores(token_logits=token_logits, best=best, weight=weight, rank=rank)


@dependent_kernel(do_not_specialize_on_alignment=["token_ptr"])
def _rank_kernel(
    logits_ptr, token_ptr, token_logit_ptr, rank_ptr, best_ptr, vocab_size, row_stride, num_chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token_logits = tl.load(logits_ptr + row * row_stride + tl.load(token_ptr + row))
    if chunk == 0:
        tl.store(token_logit_ptr + row, token_logits)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < vocab_size
    logit = tl.load(logits_ptr + row * row_stride + column, mask=inside, other=float("-inf"))
    above = tl.sum((inside & (logit >= token_logits)).to(tl.int64), axis=0)
    tl.atomic_add(rank_ptr + row, above, sem="relaxed")
    tl.store(best_ptr + row * num_chunks + chunk, tl.max(logit, axis=0))


@dependent_kernel
def _weigh_kernel(
    logits_ptr, chunk_best_ptr, best_ptr, weight_ptr, vocab_size, row_stride, num_chunks,
    CHUNK: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_BLOCK)
    bests = tl.load(
        chunk_best_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf")
    )
    best = tl.max(bests, axis=0)
    if tl.program_id(1) == 0:
        tl.store(best_ptr + row, best)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(
        logits_ptr + row * row_stride + column, mask=column < vocab_size, other=float("-inf")
    )
    weight = tl.exp(logit - best) * _WEIGHT_SCALE
    # NaN has no weight.
    weight = tl.where(weight >= 0.0, weight, 0.0).to(tl.int64)
    tl.atomic_add(weight_ptr + row, tl.sum(weight, axis=0), sem="relaxed")
