"""Triton thresholds of min-p, top-k and top-p: the smallest logit that they keep in each row,
without sorting.

Five launches: maxima of chunks, and zeros for the histograms; histograms of counts and weights by
distance from the row's maximum; the buckets of the searched logits; the logits in these buckets,
gathered; a bisection among them. All sums are of integers, so they do not depend on the order of
additions, and a row's result does not depend on other rows. A few thousand gathered logits are
stored; if more are in the buckets (many equal logits), the bisection reads the row itself.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: SIM102  (a constant condition that stands alone drops what it guards at compile time)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sample_tokens import base, thresholds
from kernels.sample_tokens.base import SamplingParameters
from kernels.tiles import cdiv, next_power_of_2

CHUNK = 4096
"""Number of tokens per program."""
NUM_BUCKETS = 2048
NUM_CANDIDATES = 4096
_SEARCH_BLOCK = 2048
_PLAN_WIDTH = 8
"""Number of fields that `_locate_kernel` stores per row."""

_GREEDY_BELOW = tl.constexpr(base.GREEDY_BELOW)
_BUCKETS_PER_LOGIT = tl.constexpr(32.0)
"""Number of buckets per unit of logits before temperature."""
_WEIGHT_SCALE = tl.constexpr(2.0**thresholds.WEIGHT_BITS)
_BUCKETS = tl.constexpr(NUM_BUCKETS)
_WIDTH = tl.constexpr(_PLAN_WIDTH)
_CAPACITY = tl.constexpr(NUM_CANDIDATES)


def find_thresholds(logits: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    """Thresholds of logits over temperature, fp32 [R]; -inf for rows without filters."""
    rows, vocab_size = logits.shape
    device = logits.device
    num_chunks = cdiv(vocab_size, CHUNK)
    result = torch.empty(rows, dtype=torch.float32, device=device)
    chunk_best = torch.empty(rows, num_chunks, dtype=torch.float32, device=device)
    counts = torch.empty(rows, NUM_BUCKETS, dtype=torch.int32, device=device)
    weights = torch.empty(rows, NUM_BUCKETS, dtype=torch.int64, device=device)
    plan = torch.empty(rows, _PLAN_WIDTH, dtype=torch.int64, device=device)
    num_candidates = torch.empty(rows, dtype=torch.int32, device=device)
    candidates = torch.empty(rows, NUM_CANDIDATES, dtype=torch.float32, device=device)
    temperature = parameters.temperature
    own = (temperature, *_or_any(parameters))
    flags = {
        "HAS_TOP_K": parameters.top_k is not None,
        "HAS_TOP_P": parameters.top_p is not None,
        "HAS_MIN_P": parameters.log_min_p is not None,
    }
    shape = (vocab_size, logits.stride(0), num_chunks)
    chunk_block = next_power_of_2(num_chunks)
    grid = (rows, num_chunks)
    blocks = {"CHUNK": CHUNK, "CHUNKS_BLOCK": chunk_block}
    _chunk_best_kernel[grid](
        logits, chunk_best, counts, weights, num_candidates, *shape, CHUNK=CHUNK, num_warps=8
    )
    _histogram_kernel[grid](
        logits, *own, chunk_best, counts, weights, *shape, **flags, **blocks, num_warps=8
    )
    _locate_kernel[(rows,)](*own, counts, weights, plan, **flags, num_warps=8)
    _collect_kernel[grid](
        logits, *own, chunk_best, plan, num_candidates, candidates, *shape, **flags, **blocks,
        num_warps=8,
    )  # fmt: skip
    _search_kernel[(rows,)](
        logits, *own, chunk_best, plan, num_candidates, candidates, result, *shape, **flags,
        CHUNKS_BLOCK=chunk_block, BLOCK=_SEARCH_BLOCK, num_warps=8,
    )  # fmt: skip
    return result


def _or_any(parameters: SamplingParameters) -> list[torch.Tensor]:
    """Tensors of the filters; unused ones are replaced by an arbitrary tensor."""
    found = (parameters.top_k, parameters.top_p, parameters.log_min_p)
    return [parameters.temperature if tensor is None else tensor for tensor in found]


@triton.jit
def _chunk_best_kernel(
    logits_ptr, best_ptr, counts_ptr, weights_ptr, num_candidates_ptr,
    vocab_size, row_stride, num_chunks, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(
        logits_ptr + row * row_stride + column, mask=column < vocab_size, other=float("-inf")
    )
    value = tl.where(value == value, value, float("-inf"))
    tl.store(best_ptr + row * num_chunks + tl.program_id(1), tl.max(value, axis=0))
    if tl.program_id(1) == 0:
        cell = row * _BUCKETS + tl.arange(0, _BUCKETS)
        tl.store(counts_ptr + cell, tl.zeros((_BUCKETS,), tl.int32))
        tl.store(weights_ptr + cell, tl.zeros((_BUCKETS,), tl.int64))
        tl.store(num_candidates_ptr + row, 0)


_PARAMETERS = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"]


@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def _histogram_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, best_ptr,
    counts_ptr, weights_ptr, vocab_size, row_stride, num_chunks,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = _filters_of(row, temperature, top_k_ptr, top_p_ptr, HAS_TOP_K, HAS_TOP_P)
    if (top_k > 0) | (top_p < 1.0):
        best, floor = _range_of(
            row, temperature, min_p_ptr, best_ptr, num_chunks, HAS_MIN_P, CHUNKS_BLOCK
        )
        column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        logit = tl.load(
            logits_ptr + row * row_stride + column, mask=column < vocab_size, other=float("-inf")
        )
        scaled = tl.div_rn(logit, temperature)
        kept = (scaled >= floor) & (scaled > float("-inf"))
        cell = row * _BUCKETS + _bucket_of(scaled, best, temperature)
        if HAS_TOP_K:
            if top_k > 0:
                one = tl.full((CHUNK,), 1, tl.int32)
                tl.atomic_add(counts_ptr + cell, one, mask=kept, sem="relaxed")
        if HAS_TOP_P:
            if top_p < 1.0:
                weight = _weight_of(scaled, best)
                tl.atomic_add(weights_ptr + cell, weight, mask=kept & (weight > 0), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def _locate_kernel(
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, counts_ptr, weights_ptr, plan_ptr,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
):  # fmt: skip
    """Stores per row: the bucket of the k-th largest logit (-1 without top-k), and how many of its
    logits are among the k largest; the weight above that bucket, or of all; the first and last
    bucket in which the nucleus may end (-1 without top-p), and the weight above the first."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = _filters_of(row, temperature, top_k_ptr, top_p_ptr, HAS_TOP_K, HAS_TOP_P)
    bucket = tl.arange(0, _BUCKETS)
    k_bucket = tl.full((), -1, tl.int64)
    k_rest = tl.full((), 0, tl.int64)
    if HAS_TOP_K:
        counts = tl.load(counts_ptr + row * _BUCKETS + bucket).to(tl.int64)
        if (top_k > 0) & (tl.sum(counts, axis=0) >= top_k):
            reached = tl.cumsum(counts, axis=0)
            k_bucket = tl.sum((reached < top_k).to(tl.int64), axis=0)
            k_rest = top_k - tl.sum(tl.where(bucket < k_bucket, counts, 0), axis=0)
    weight_above = tl.full((), 0, tl.int64)
    first = tl.full((), -1, tl.int64)
    last = tl.full((), -1, tl.int64)
    before_first = tl.full((), 0, tl.int64)
    if HAS_TOP_P:
        if top_p < 1.0:
            weights = tl.load(weights_ptr + row * _BUCKETS + bucket)
            stop = tl.where(k_bucket >= 0, k_bucket, _BUCKETS)
            weight_above = tl.sum(tl.where(bucket < stop, weights, 0), axis=0)
            most = tl.sum(tl.where(bucket <= stop, weights, 0), axis=0)
            reached = tl.cumsum(weights, axis=0)
            # The share of the k-th logit's bucket is not known yet; its full weight is an upper
            # bound.
            first = tl.sum((reached < _target(top_p, weight_above)).to(tl.int64), axis=0)
            last = tl.sum((reached < _target(top_p, most)).to(tl.int64), axis=0)
            first = tl.minimum(first, _BUCKETS - 1)
            before_first = tl.sum(tl.where(bucket < first, weights, 0), axis=0)
    cell = plan_ptr + row * _WIDTH
    tl.store(cell, k_bucket)
    tl.store(cell + 1, k_rest)
    tl.store(cell + 2, weight_above)
    tl.store(cell + 3, first)
    tl.store(cell + 4, last)
    tl.store(cell + 5, before_first)


@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def _collect_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, best_ptr,
    plan_ptr, num_candidates_ptr, candidates_ptr, vocab_size, row_stride, num_chunks,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k_bucket = tl.load(plan_ptr + row * _WIDTH)
    first = tl.load(plan_ptr + row * _WIDTH + 3)
    last = tl.load(plan_ptr + row * _WIDTH + 4)
    if (k_bucket >= 0) | (first >= 0):
        temperature = tl.load(temperature_ptr + row)
        best, floor = _range_of(
            row, temperature, min_p_ptr, best_ptr, num_chunks, HAS_MIN_P, CHUNKS_BLOCK
        )
        column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        logit = tl.load(
            logits_ptr + row * row_stride + column, mask=column < vocab_size, other=float("-inf")
        )
        scaled = tl.div_rn(logit, temperature)
        bucket = _bucket_of(scaled, best, temperature)
        wanted = (bucket == k_bucket) | ((bucket >= first) & (bucket <= last))
        wanted = wanted & (scaled >= floor) & (scaled > float("-inf"))
        number = tl.sum(wanted.to(tl.int32), axis=0)
        if number > 0:
            # The order of candidates depends on that of chunks; the result of the search does not.
            start = tl.atomic_add(num_candidates_ptr + row, number, sem="relaxed")
            place = start + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
            tl.store(
                candidates_ptr + row * _CAPACITY + place, logit, mask=wanted & (place < _CAPACITY)
            )


@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def _search_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, best_ptr,
    plan_ptr, num_candidates_ptr, candidates_ptr, result_ptr, vocab_size, row_stride, num_chunks,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    threshold = float("-inf")
    if temperature >= _GREEDY_BELOW:
        best, floor = _range_of(
            row, temperature, min_p_ptr, best_ptr, num_chunks, HAS_MIN_P, CHUNKS_BLOCK
        )
        threshold = floor
        source = candidates_ptr + row * _CAPACITY
        length = tl.load(num_candidates_ptr + row)
        if length > _CAPACITY:
            source = logits_ptr + row * row_stride
            length = vocab_size
        cell = plan_ptr + row * _WIDTH
        k_bucket = tl.load(cell)
        total = tl.load(cell + 2)
        if HAS_TOP_K:
            if k_bucket >= 0:
                least = _least(
                    source, length, best, floor, temperature, k_bucket, k_bucket,
                    tl.load(cell + 1), False, BLOCK,
                )  # fmt: skip
                if HAS_TOP_P:
                    total += _weight_from(source, length, best, least, temperature, k_bucket, BLOCK)
                threshold = tl.maximum(threshold, least)
        if HAS_TOP_P:
            first = tl.load(cell + 3)
            if first >= 0:
                rest = _target(tl.load(top_p_ptr + row), total) - tl.load(cell + 5)
                least = _least(
                    source, length, best, floor, temperature, first, tl.load(cell + 4), rest,
                    True, BLOCK,
                )  # fmt: skip
                threshold = tl.maximum(threshold, least)
    tl.store(result_ptr + row, threshold)


@triton.jit
def _least(
    source, length, best, floor, temperature, first, last, wanted,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest logit in the buckets such that it and larger ones reach `wanted`, by weight if
    WEIGHTED, else by count."""
    low, high = _key_range(source, length, best, floor, temperature, first, last, BLOCK)
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, length, BLOCK):
            scaled, inside = _candidates(
                source, length, start, best, floor, temperature, first, last, BLOCK
            )
            inside = inside & (_key_of(scaled) >= middle)
            if WEIGHTED:
                reached += tl.where(inside, _weight_of(scaled, best), 0)
            else:
                reached += inside.to(tl.int64)
        if tl.sum(reached, axis=0) >= wanted:
            low = middle
        else:
            high = middle - 1
    return _logit_of_key(low)


@triton.jit
def _key_range(source, length, best, floor, temperature, first, last, BLOCK: tl.constexpr):
    low = tl.full((BLOCK,), 1 << 31, tl.int64)
    high = tl.full((BLOCK,), -(1 << 31), tl.int64)
    for start in range(0, length, BLOCK):
        scaled, inside = _candidates(
            source, length, start, best, floor, temperature, first, last, BLOCK
        )
        key = _key_of(scaled)
        low = tl.minimum(low, tl.where(inside, key, 1 << 31))
        high = tl.maximum(high, tl.where(inside, key, -(1 << 31)))
    return tl.min(low, axis=0), tl.max(high, axis=0)


@triton.jit
def _weight_from(source, length, best, least, temperature, bucket, BLOCK: tl.constexpr):
    """Sum of weights of a bucket's logits that are at least `least`."""
    weight = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, length, BLOCK):
        scaled, inside = _candidates(
            source, length, start, best, least, temperature, bucket, bucket, BLOCK
        )
        weight += tl.where(inside, _weight_of(scaled, best), 0)
    return tl.sum(weight, axis=0)


@triton.jit
def _candidates(
    source, length, start, best, floor, temperature, first, last, BLOCK: tl.constexpr
):  # fmt: skip
    place = start + tl.arange(0, BLOCK)
    logit = tl.load(source + place, mask=place < length, other=float("-inf"))
    scaled = tl.div_rn(logit, temperature)
    bucket = _bucket_of(scaled, best, temperature)
    inside = (bucket >= first) & (bucket <= last) & (scaled >= floor) & (scaled > float("-inf"))
    return scaled, inside


@triton.jit
def _filters_of(
    row, temperature, top_k_ptr, top_p_ptr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr
):  # fmt: skip
    """The row's top-k, 0 for none, and top-p, 1 for none."""
    top_k = tl.full((), 0, tl.int64)
    top_p = tl.full((), 1.0, tl.float32)
    if temperature >= _GREEDY_BELOW:
        if HAS_TOP_K:
            top_k = tl.load(top_k_ptr + row)
        if HAS_TOP_P:
            top_p = tl.load(top_p_ptr + row)
    return top_k, top_p


@triton.jit
def _range_of(
    row, temperature, min_p_ptr, best_ptr, num_chunks,
    HAS_MIN_P: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
):  # fmt: skip
    """The row's largest logit over temperature, and the smallest one that min-p keeps."""
    chunk = tl.arange(0, CHUNKS_BLOCK)
    bests = tl.load(
        best_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf")
    )
    best = tl.div_rn(tl.max(bests, axis=0), temperature)
    floor = tl.full((), float("-inf"), tl.float32)
    if HAS_MIN_P:
        floor = best + tl.load(min_p_ptr + row)
    return best, floor


@triton.jit
def _bucket_of(scaled, best, temperature):
    """Bucket of a logit: 0 for the largest one, and monotonic in the distance from it."""
    distance = (best - scaled) * (temperature * _BUCKETS_PER_LOGIT)
    # Written so that NaN falls into the last bucket.
    return tl.where(distance < _BUCKETS - 1, distance, _BUCKETS - 1).to(tl.int32)


@triton.jit
def _weight_of(scaled, best):
    weight = tl.exp(scaled - best) * _WEIGHT_SCALE
    return tl.where(weight >= 0.0, weight, 0.0).to(tl.int64)


@triton.jit
def _target(top_p, total):
    """Weight of the nucleus: top_p times the total weight, rounded up, at least 1."""
    share = top_p.to(tl.float64) * total.to(tl.float64)
    target = share.to(tl.int64)
    target += (target.to(tl.float64) < share).to(tl.int64)
    return tl.maximum(target, 1)


@triton.jit
def _key_of(value):
    """int64 in the same order as fp32 values."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _logit_of_key(key):
    bits = key.to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)
