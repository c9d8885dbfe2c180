"""Triton sampling: the best token of each chunk of the vocabulary, then the best of all chunks.

Filters become one threshold per row: the smallest logit that they keep (`triton_threshold`). Noise
is computed when it is added and never stored.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.gumbel_noise.triton_kernel import noise_of
from kernels.registry import implements
from kernels.sample_tokens import GREEDY_BELOW, SamplingParameters, TokenCells, sample_tokens
from kernels.sample_tokens.triton_narrow import CHUNK, SEGMENT
from kernels.sample_tokens.triton_threshold import find_thresholds
from kernels.tiles import cdiv, next_power_of_2

_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)


@implements(sample_tokens, "triton")
def launch_sample_tokens(
    logits: torch.Tensor,
    parameters: SamplingParameters,
    out: torch.Tensor | None = None,
    cells: TokenCells | None = None,
) -> torch.Tensor:
    """Launches two kernels, preceded by four others if rows may have filters."""
    assert logits.dtype == torch.float32, f"sampling needs fp32 logits, got {logits.dtype}"
    assert logits.stride(1) == 1, "logits of a row must be contiguous"
    rows, vocab_size = logits.shape
    device = logits.device
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return out
    num_chunks = cdiv(vocab_size, CHUNK)
    best = torch.empty(rows, num_chunks, dtype=torch.float32, device=device)
    token = torch.empty(rows, num_chunks, dtype=torch.int32, device=device)
    values = maxima = parameters.temperature  # unused
    if parameters.filters:
        values, maxima = find_thresholds(logits, parameters)
    _sample_kernel[(rows, num_chunks)](
        logits, parameters.temperature, parameters.seeds, parameters.positions,
        values, maxima, best, token, vocab_size, logits.stride(0),
        FILTERS=parameters.filters, CHUNK=CHUNK, SEGMENT=SEGMENT, num_warps=8,
    )  # fmt: skip
    _pick_kernel[(rows,)](
        best, token, out, *((token, out) if cells is None else cells), num_chunks,
        HAS_CELLS=cells is not None, BLOCK=next_power_of_2(num_chunks), num_warps=1,
    )  # fmt: skip
    return out


@dependent_kernel(
    do_not_specialize_on_alignment=[
        "temperature_ptr", "seed_ptr", "position_ptr", "threshold_ptr", "maxima_ptr",
    ]
)  # fmt: skip
def _sample_kernel(
    logits_ptr, temperature_ptr, seed_ptr, position_ptr, threshold_ptr, maxima_ptr, best_ptr,
    token_ptr, vocab_size, row_stride,
    FILTERS: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < vocab_size
    temperature = tl.load(temperature_ptr + row)
    if FILTERS:
        # Segments without a token to keep are not read.
        segments: tl.constexpr = CHUNK // SEGMENT
        cell = (row * tl.num_programs(1) + chunk) * segments + tl.arange(0, segments)
        largest = tl.load(maxima_ptr + cell)
        if temperature >= _GREEDY_BELOW:
            largest = tl.div_rn(largest, temperature)
        kept = largest >= tl.load(threshold_ptr + row)
        kept = tl.broadcast_to(kept[:, None], (segments, SEGMENT))
        inside = inside & tl.reshape(kept, (CHUNK,))
    value = tl.load(logits_ptr + row * row_stride + column, mask=inside, other=float("-inf"))
    if temperature >= _GREEDY_BELOW:
        scaled = tl.div_rn(value, temperature)
        noise = noise_of(tl.load(seed_ptr + row), tl.load(position_ptr + row), column)
        value = noise + scaled
        if FILTERS:
            value = tl.where(scaled >= tl.load(threshold_ptr + row), value, float("-inf"))
    # NaN would make the result depend on the order of the reduction, and one past the end of the
    # row could be selected.
    value = tl.where(inside & (value == value), value, float("-inf"))
    best, place = tl.max(value, axis=0, return_indices=True)
    cell = row * tl.num_programs(1) + chunk
    tl.store(best_ptr + cell, best)
    tl.store(token_ptr + cell, chunk * CHUNK + place)


@dependent_kernel(do_not_specialize_on_alignment=["out_ptr", "cells_ptr"])
def _pick_kernel(
    best_ptr, token_ptr, out_ptr, tokens_ptr, cells_ptr, num_chunks,
    HAS_CELLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    best = tl.load(
        best_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf")
    )
    # Ties go to the first token, as in torch.
    _, place = tl.max(best, axis=0, return_indices=True)
    token = tl.load(token_ptr + row * num_chunks + place)
    tl.store(out_ptr + row, token.to(tl.int64))
    if HAS_CELLS:
        tl.store(tokens_ptr + tl.load(cells_ptr + row), token)
