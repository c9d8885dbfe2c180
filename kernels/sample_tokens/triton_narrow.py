"""Triton thresholds of rows whose filters keep few tokens, the usual case: one read of the logits.

The first kernel stores the largest logit of each segment of 128 tokens. Let m be the k-th largest
of these maxima: at least k logits are >= m, so the k largest logits are all in segments whose
maximum is >= m. The second kernel, one program per row, gathers the tokens of these segments and
searches among them. Rows for which it finds no threshold (flat distributions, thousands of tokens
that are kept or tied) stay open, and are searched with histograms (`triton_threshold`).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: SIM102  (a constant condition that stands alone drops what it guards at compile time)
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.sample_tokens import base, thresholds
from kernels.sample_tokens.base import SamplingParameters
from kernels.tiles import cdiv, next_power_of_2

CHUNK = 4096
"""Number of tokens per program."""
SEGMENT = 128
"""Number of tokens per segment."""
NUM_BUCKETS = 2048
NUM_CANDIDATES = 4096
_NUCLEUS_SEGMENTS = 256
"""Number of segments that are searched for the nucleus in rows without top-k; a language model's
nucleus of 0.95 has tens of tokens."""
_MOST_SEGMENTS = 512
"""Maximum number of segments that are gathered."""
_TILE = 16
"""Number of segments that are gathered at a time."""
_TOLERANCE = 2.0**-12
"""Relative error allowed for a sum of fp32 weights: eight times the error of weights of logits up
to `_LARGEST_EXACT`, and far above any error that the order of additions causes."""
_LARGEST_EXACT = 512.0
"""Maximum magnitude of logits divided by temperature for which sums of fp32 weights are used."""

GREEDY_BELOW = tl.constexpr(base.GREEDY_BELOW)
WEIGHT_SCALE = tl.constexpr(2.0**thresholds.WEIGHT_BITS)
BUCKETS = tl.constexpr(NUM_BUCKETS)
CAPACITY = tl.constexpr(NUM_CANDIDATES)
SEGMENT_SIZE = tl.constexpr(SEGMENT)
_PER_CHUNK = tl.constexpr(CHUNK // SEGMENT)
_MOST_EXACT = tl.constexpr(_LARGEST_EXACT)
_FEW, _MOST, _ROWS = (tl.constexpr(n) for n in (_NUCLEUS_SEGMENTS, _MOST_SEGMENTS, _TILE))
_LOW, _HIGH = (tl.constexpr(1.0 + sign * _TOLERANCE) for sign in (-1.0, 1.0))

PARAMETERS = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"]


class Narrowed(NamedTuple):
    """Result of `narrow`: thresholds per row, and inputs of the histogram search in open rows (see
    `is_open`)."""

    thresholds: torch.Tensor
    """fp32 [R]: threshold per row, for logits divided by temperature. -inf for rows without
    filters; for open rows (see `is_open`), only min-p is applied."""
    is_open: torch.Tensor
    """int32 [R]: 1 for open rows, whose thresholds have not been found yet, otherwise 0."""
    best: torch.Tensor
    """fp32 [R]: largest logits divided by temperature; unset for greedy rows."""
    maxima: torch.Tensor
    """fp32 [R, segments]: largest logit of each segment, -inf for NaN; padded to whole chunks."""
    counts: torch.Tensor
    """int32 [R, NUM_BUCKETS]: zeros in open rows; otherwise unset."""
    weights: torch.Tensor
    """int64 [R, NUM_BUCKETS]: zeros in open rows; otherwise unset."""
    candidates: torch.Tensor
    """fp32 [R, NUM_CANDIDATES]: scratch memory."""


def narrow(
    logits: torch.Tensor, parameters: SamplingParameters, flags: dict[str, bool]
) -> Narrowed:
    """Launches the kernels that find maxima of segments and thresholds of rows.

    Args:
        logits: fp32 [R, V].
        parameters: sampling parameters of the rows.
        flags: compile-time arguments, from `filters_of`.
    """
    (rows, vocab_size), device = logits.shape, logits.device
    num_chunks = cdiv(vocab_size, CHUNK)
    num_segments = num_chunks * (CHUNK // SEGMENT)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    found = Narrowed(
        thresholds=empty(rows),
        is_open=empty(rows, dtype=torch.int32),
        best=empty(rows),
        maxima=empty(rows, num_segments),
        counts=empty(rows, NUM_BUCKETS, dtype=torch.int32),
        weights=empty(rows, NUM_BUCKETS, dtype=torch.int64),
        candidates=empty(rows, NUM_CANDIDATES),
    )
    sums, segments = empty(rows, num_segments), empty(rows, _MOST_SEGMENTS, dtype=torch.int32)
    own = tensors_of(parameters)
    _maxima_kernel[(rows, num_chunks)](
        logits, own[0], *own[1:3], found.maxima, sums, vocab_size, logits.stride(0),
        HAS_TOP_K=flags["HAS_TOP_K"], HAS_TOP_P=flags["HAS_TOP_P"], CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    _narrow_kernel[(rows,)](
        logits, *own, found.maxima, sums, found.thresholds, found.is_open, found.best,
        found.counts, found.weights, segments, found.candidates, vocab_size, logits.stride(0),
        num_segments, **flags, SEGMENTS_BLOCK=next_power_of_2(num_segments), num_warps=8,
    )  # fmt: skip
    return found


def filters_of(parameters: SamplingParameters) -> dict[str, bool]:
    """Compile-time arguments of kernels: which filters any row may have."""
    return {
        "HAS_TOP_K": parameters.top_k is not None,
        "HAS_TOP_P": parameters.top_p is not None,
        "HAS_MIN_P": parameters.log_min_p is not None,
    }


def tensors_of(parameters: SamplingParameters) -> list[torch.Tensor]:
    """Temperatures, top-k, top-p and min-p; unused ones are replaced by an arbitrary tensor."""
    temperature = parameters.temperature
    found = (parameters.top_k, parameters.top_p, parameters.log_min_p)
    return [temperature, *(temperature if tensor is None else tensor for tensor in found)]


@dependent_kernel(do_not_specialize_on_alignment=PARAMETERS[:3])
def _maxima_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, maxima_ptr, sums_ptr, vocab_size,
    row_stride, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Stores the largest logit of each segment. For rows with top-p but without top-k, also stores
    the sum of the weights of each segment's tokens, relative to the weight of its largest logit."""
    wait_for_previous_kernel()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(
        logits_ptr + row * row_stride + column, mask=column < vocab_size, other=float("-inf")
    )
    value = tl.reshape(tl.where(value == value, value, float("-inf")), (_PER_CHUNK, SEGMENT_SIZE))
    largest = tl.max(value, axis=1)
    cell = (row * tl.num_programs(1) + chunk) * _PER_CHUNK + tl.arange(0, _PER_CHUNK)
    tl.store(maxima_ptr + cell, largest)
    if HAS_TOP_P:
        temperature = tl.load(temperature_ptr + row)
        top_k, top_p = filters_of_row(row, temperature, top_k_ptr, top_p_ptr, HAS_TOP_K, HAS_TOP_P)
        if (top_p < 1.0) & (top_k <= 0):
            distance = (value - largest[:, None]) * (1.0 / temperature)
            weight = tl.where(value > float("-inf"), tl.exp(distance), 0.0)
            tl.store(sums_ptr + cell, tl.sum(weight, axis=1))


@dependent_kernel(do_not_specialize_on_alignment=PARAMETERS)
def _narrow_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, maxima_ptr, sums_ptr,
    result_ptr, open_ptr, best_ptr, counts_ptr, weights_ptr, segments_ptr, candidates_ptr,
    vocab_size, row_stride, num_segments,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
    SEGMENTS_BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = filters_of_row(row, temperature, top_k_ptr, top_p_ptr, HAS_TOP_K, HAS_TOP_P)
    threshold = tl.full((), float("-inf"), tl.float32)
    is_open = tl.full((), 0, tl.int32)
    if temperature >= GREEDY_BELOW:
        segment = tl.arange(0, SEGMENTS_BLOCK)
        place = row * num_segments + segment
        largest = tl.load(maxima_ptr + place, mask=segment < num_segments, other=float("-inf"))
        largest = tl.div_rn(largest, temperature)
        best = tl.max(largest, axis=0)
        tl.store(best_ptr + row, best)
        if HAS_MIN_P:
            threshold = best + tl.load(min_p_ptr + row)
        if (top_k > 0) | (top_p < 1.0):
            least = _nth_largest(largest, tl.where(top_k > 0, top_k, _FEW))
            least = tl.where(least >= threshold, least, threshold)
            number = _gather(
                logits_ptr + row * row_stride, segments_ptr + row * _MOST,
                candidates_ptr + row * CAPACITY, segment, largest, least, temperature, vocab_size,
            )  # fmt: skip
            is_open = (number > CAPACITY).to(tl.int32)
            if number <= CAPACITY:
                cell = tl.arange(0, CAPACITY)
                scaled = tl.load(
                    candidates_ptr + row * CAPACITY + cell, mask=cell < number, other=float("-inf")
                )
                # Sums of rows that only have top-p.
                total = tl.full((), 0.0, tl.float32)
                is_whole = (top_k > 0) | (least <= threshold)
                if HAS_TOP_P:
                    if (top_p < 1.0) & (top_k <= 0):
                        sums = tl.load(sums_ptr + place, mask=segment < num_segments, other=0.0)
                        total = tl.sum(sums * tl.exp(largest - best), axis=0)
                threshold, is_open = _search(
                    scaled, number, best, threshold, top_k, top_p, total, is_whole, HAS_TOP_K,
                    HAS_TOP_P,
                )  # fmt: skip
        if is_open > 0:
            cell = row * BUCKETS + tl.arange(0, BUCKETS)
            tl.store(counts_ptr + cell, tl.zeros((BUCKETS,), tl.int32))
            tl.store(weights_ptr + cell, tl.zeros((BUCKETS,), tl.int64))
    tl.store(result_ptr + row, threshold)
    tl.store(open_ptr + row, is_open)


@triton.jit
def _gather(
    logits, segments, candidates, segment, largest, least, temperature, vocab_size
):  # fmt: skip
    """Divides the logits by temperature and stores those >= `least` as candidates. Returns their
    number, or a number larger than CAPACITY if too many segments contain candidates."""
    chosen = (largest >= least) & (largest > float("-inf"))
    count = tl.sum(chosen.to(tl.int32), axis=0)
    number = tl.full((), 0, tl.int32)
    if count > _MOST:
        number = number + (CAPACITY + 1)
    else:
        tl.store(segments + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, segment, mask=chosen)
        # HAZARD(order): all threads' stores must precede the loads.
        tl.debug_barrier()
        for start in range(0, count, _ROWS):
            index = start + tl.arange(0, _ROWS)
            own = tl.load(segments + index, mask=index < count, other=0)
            column = own[:, None] * SEGMENT_SIZE + tl.arange(0, SEGMENT_SIZE)[None, :]
            there = (index < count)[:, None] & (column < vocab_size)
            logit = tl.load(logits + column, mask=there, other=float("-inf"))
            scaled = tl.reshape(tl.div_rn(logit, temperature), (_ROWS * SEGMENT_SIZE,))
            kept = (scaled >= least) & (scaled > float("-inf"))
            place = number + tl.cumsum(kept.to(tl.int32), axis=0) - 1
            tl.store(candidates + place, scaled, mask=kept & (place < CAPACITY))
            number += tl.sum(kept.to(tl.int32), axis=0)
        tl.debug_barrier()
    return number


@triton.jit
def _search(
    scaled, number, best, threshold, top_k, top_p, total, is_whole,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr,
):  # fmt: skip
    """A row's threshold, and 1 if it is not among the candidates, otherwise 0.

    Args:
        scaled: [CAPACITY]: the candidates, then -inf.
        number: number of candidates.
        best: the row's largest logit.
        threshold: the smallest logit that min-p keeps.
        top_k: top-k; 0 if there is none.
        top_p: top-p; 1 if there is none.
        total: sum of all weights relative to that of `best`, if not all kept tokens are candidates.
        is_whole: whether all tokens that min-p and top-k keep are candidates.
    """
    is_open = tl.full((), 0, tl.int32)
    if HAS_TOP_K:
        if (top_k > 0) & (number >= top_k):
            least = _nth_largest(scaled, top_k)
            threshold = tl.where(least >= threshold, least, threshold)
    if HAS_TOP_P:
        if top_p < 1.0:
            weight = tl.where(scaled >= threshold, weight_of(scaled, best), 0)
            own = tl.sum(weight, axis=0)
            low, high = own, own
            if not is_whole:
                # The sum of integer weights is in this range, unless logits are rounded coarsely.
                is_exact = (total < (1 << 22)) & (tl.abs(best) < _MOST_EXACT)
                wide = tl.where(is_exact, total, 0.0).to(tl.float64) * WEIGHT_SCALE
                low, high = (wide * _LOW).to(tl.int64), (wide * _HIGH).to(tl.int64)
            target = target_of(top_p, high)
            least = _weighted(scaled, weight, target)
            above = tl.sum(tl.where(scaled > least, weight, 0), axis=0)
            is_found = (own >= target) & (above < target_of(top_p, low)) & (high > 0)
            is_open = tl.where(is_found, 0, 1).to(tl.int32)
            if is_found:
                threshold = tl.where(least >= threshold, least, threshold)
    return threshold, is_open


@triton.jit
def _nth_largest(values, wanted):
    """Largest value v for which at least `wanted` values are >= v; -inf if there are fewer."""
    keys = key_of(values).to(tl.int32)
    low, high = tl.min(keys, axis=0).to(tl.int64), tl.max(keys, axis=0).to(tl.int64)
    is_reached = wanted <= values.shape[0]
    while low < high:
        middle = low + (high - low + 1) // 2
        if tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0) >= wanted:
            low = middle
        else:
            high = middle - 1
    return tl.where(is_reached, logit_of_key(low), float("-inf"))


@triton.jit
def _weighted(values, weights, target):
    """Largest value v for which the weights of all values >= v sum to at least `target`."""
    keys = key_of(values).to(tl.int32)
    low, high = tl.min(keys, axis=0).to(tl.int64), tl.max(keys, axis=0).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        if tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0), axis=0) >= target:
            low = middle
        else:
            high = middle - 1
    return logit_of_key(low)


@triton.jit
def filters_of_row(
    row, temperature, top_k_ptr, top_p_ptr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr
):  # fmt: skip
    """The row's top-k (0 if there is none) and top-p (1 if there is none)."""
    top_k = tl.full((), 0, tl.int64)
    top_p = tl.full((), 1.0, tl.float32)
    if temperature >= GREEDY_BELOW:
        if HAS_TOP_K:
            top_k = tl.load(top_k_ptr + row)
        if HAS_TOP_P:
            top_p = tl.load(top_p_ptr + row)
    return top_k, top_p


@triton.jit
def weight_of(scaled, best):
    """Weight of a logit relative to the largest one, int64 in fixed point; 0 for NaN."""
    weight = tl.exp(scaled - best) * WEIGHT_SCALE
    return tl.where(weight >= 0.0, weight, 0.0).to(tl.int64)


@triton.jit
def target_of(top_p, total):
    """Weight of the nucleus: top_p times the total weight, rounded up, at least 1."""
    share = top_p.to(tl.float64) * total.to(tl.float64)
    target = share.to(tl.int64)
    target += (target.to(tl.float64) < share).to(tl.int64)
    return tl.maximum(target, 1)


@triton.jit
def key_of(value):
    """Maps fp32 values to int64 keys in the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def logit_of_key(key):
    """The fp32 value of a key from `key_of`."""
    bits = key.to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)
