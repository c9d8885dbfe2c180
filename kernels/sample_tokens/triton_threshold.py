"""Triton thresholds of min-p, top-k and top-p: the smallest logit that they keep in each row,
without sorting.

There are four launches. The first two find thresholds in one read of the logits (`triton_narrow`),
except in flat rows. For these, the third computes histograms of counts and weights by distance from
the row's maximum. The fourth has one program per row: it finds the buckets that contain the
thresholds, gathers the logits in these buckets, and searches among them by bisection. It stores a
few thousand logits; if the buckets contain more (many equal logits), the bisection reads the row
itself. All sums that decide are integer sums, so results do not depend on the order of additions or
on other rows.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: SIM102  (a constant condition that stands alone drops what it guards at compile time)
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.sample_tokens.base import SamplingParameters
from kernels.sample_tokens.triton_narrow import (
    BUCKETS,
    CAPACITY,
    CHUNK,
    PARAMETERS,
    filters_of,
    filters_of_row,
    key_of,
    logit_of_key,
    narrow,
    target_of,
    tensors_of,
    weight_of,
)
from kernels.tiles import cdiv

_SEARCH_BLOCK = 2048
_BUCKETS_PER_LOGIT = tl.constexpr(32.0)
"""Number of buckets per unit of logits before temperature."""


class Thresholds(NamedTuple):
    """Thresholds of rows, and the largest logits of segments. Segments below the threshold are
    skipped."""

    values: torch.Tensor
    """fp32 [R]: thresholds of logits divided by temperature; -inf for rows without filters."""
    maxima: torch.Tensor
    """fp32 [R, segments]: largest logit of each segment, before temperature."""


def find_thresholds(logits: torch.Tensor, parameters: SamplingParameters) -> Thresholds:
    """Thresholds of the rows of fp32 logits [R, V]."""
    rows, vocab_size = logits.shape
    own, flags = tensors_of(parameters), filters_of(parameters)
    found = narrow(logits, parameters, flags)
    search = found.best, found.is_open, found.counts, found.weights
    _histogram_kernel[(rows, cdiv(vocab_size, CHUNK))](
        logits, *own, *search, vocab_size, logits.stride(0), **flags, CHUNK=CHUNK, num_warps=8
    )
    _search_kernel[(rows,)](
        logits, *own, *search, found.candidates, found.thresholds, vocab_size, logits.stride(0),
        **flags, BLOCK=_SEARCH_BLOCK, num_warps=8,
    )  # fmt: skip
    return Thresholds(found.thresholds, found.maxima)


@dependent_kernel(do_not_specialize_on_alignment=PARAMETERS)
def _histogram_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, best_ptr, open_ptr,
    counts_ptr, weights_ptr, vocab_size, row_stride,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(open_ptr + row) > 0:
        temperature = tl.load(temperature_ptr + row)
        top_k, top_p = filters_of_row(row, temperature, top_k_ptr, top_p_ptr, HAS_TOP_K, HAS_TOP_P)
        best, floor = _range_of(row, min_p_ptr, best_ptr, HAS_MIN_P)
        column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        logit = tl.load(
            logits_ptr + row * row_stride + column, mask=column < vocab_size, other=float("-inf")
        )
        scaled = tl.div_rn(logit, temperature)
        kept = (scaled >= floor) & (scaled > float("-inf"))
        cell = row * BUCKETS + _bucket_of(scaled, best, temperature)
        if HAS_TOP_K:
            if top_k > 0:
                one = tl.full((CHUNK,), 1, tl.int32)
                tl.atomic_add(counts_ptr + cell, one, mask=kept, sem="relaxed")
        if HAS_TOP_P:
            if top_p < 1.0:
                weight = weight_of(scaled, best)
                tl.atomic_add(weights_ptr + cell, weight, mask=kept & (weight > 0), sem="relaxed")


@dependent_kernel(do_not_specialize_on_alignment=PARAMETERS)
def _search_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, best_ptr, open_ptr,
    counts_ptr, weights_ptr, candidates_ptr, result_ptr, vocab_size, row_stride,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(open_ptr + row) > 0:
        temperature = tl.load(temperature_ptr + row)
        top_k, top_p = filters_of_row(row, temperature, top_k_ptr, top_p_ptr, HAS_TOP_K, HAS_TOP_P)
        best, threshold = _range_of(row, min_p_ptr, best_ptr, HAS_MIN_P)
        floor = threshold
        k_bucket, k_rest, total, first, last, before_first = _locate(
            counts_ptr + row * BUCKETS, weights_ptr + row * BUCKETS, top_k, top_p, HAS_TOP_K,
            HAS_TOP_P,
        )  # fmt: skip
        source, length = logits_ptr + row * row_stride, vocab_size
        candidates = candidates_ptr + row * CAPACITY
        number = _collect(
            source, length, candidates, best, floor, temperature, k_bucket, first, last, BLOCK
        )
        if number <= CAPACITY:
            source, length = candidates, number
        if HAS_TOP_K:
            if k_bucket >= 0:
                least = _least(
                    source, length, best, floor, temperature, k_bucket, k_bucket, k_rest, False,
                    BLOCK,
                )  # fmt: skip
                if HAS_TOP_P:
                    total += _weight_from(source, length, best, least, temperature, k_bucket, BLOCK)
                threshold = tl.maximum(threshold, least)
        if HAS_TOP_P:
            if first >= 0:
                rest = target_of(top_p, total) - before_first
                least = _least(
                    source, length, best, floor, temperature, first, last, rest, True, BLOCK
                )
                threshold = tl.maximum(threshold, least)
        tl.store(result_ptr + row, threshold)


@triton.jit
def _locate(
    counts_ptr, weights_ptr, top_k, top_p, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr
):  # fmt: skip
    """Locates a row's thresholds in its histograms.

    Returns:
        The bucket of the k-th largest logit (-1 if there is no top-k), and how many of its logits
        are among the k largest; the weight above that bucket, or of all buckets; the first and last
        bucket in which the nucleus may end (-1 if there is no top-p), and the weight above the
        first of them.
    """
    bucket = tl.arange(0, BUCKETS)
    k_bucket = tl.full((), -1, tl.int64)
    k_rest = tl.full((), 0, tl.int64)
    if HAS_TOP_K:
        counts = tl.load(counts_ptr + bucket).to(tl.int64)
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
            weights = tl.load(weights_ptr + bucket)
            stop = tl.where(k_bucket >= 0, k_bucket, BUCKETS)
            weight_above = tl.sum(tl.where(bucket < stop, weights, 0), axis=0)
            most = tl.sum(tl.where(bucket <= stop, weights, 0), axis=0)
            reached = tl.cumsum(weights, axis=0)
            # The share of the k-th logit's bucket is not known yet; the bucket's full weight is an
            # upper bound.
            first = tl.sum((reached < target_of(top_p, weight_above)).to(tl.int64), axis=0)
            last = tl.sum((reached < target_of(top_p, most)).to(tl.int64), axis=0)
            first = tl.minimum(first, BUCKETS - 1)
            before_first = tl.sum(tl.where(bucket < first, weights, 0), axis=0)
    return k_bucket, k_rest, weight_above, first, last, before_first


@triton.jit
def _collect(
    logits, length, candidates, best, floor, temperature, k_bucket, first, last,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Collects the logits that fall into the bucket of the k-th largest one, or into a bucket in
    which the nucleus may end; returns their number, which may exceed CAPACITY."""
    number = tl.full((), 0, tl.int32)
    for start in range(0, length, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + column, mask=column < length, other=float("-inf"))
        scaled = tl.div_rn(logit, temperature)
        bucket = _bucket_of(scaled, best, temperature)
        wanted = (bucket == k_bucket) | ((bucket >= first) & (bucket <= last))
        wanted = wanted & (scaled >= floor) & (scaled > float("-inf"))
        place = number + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        tl.store(candidates + place, logit, mask=wanted & (place < CAPACITY))
        number += tl.sum(wanted.to(tl.int32), axis=0)
    # HAZARD(order): all threads' stores must precede the loads.
    tl.debug_barrier()
    return number


@triton.jit
def _least(
    source, length, best, floor, temperature, first, last, wanted,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Largest logit in the buckets for which it and all larger ones reach `wanted`, by weight if
    WEIGHTED, otherwise by count."""
    low, high = _key_range(source, length, best, floor, temperature, first, last, BLOCK)
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, length, BLOCK):
            scaled, inside = _candidates(
                source, length, start, best, floor, temperature, first, last, BLOCK
            )
            inside = inside & (key_of(scaled) >= middle)
            if WEIGHTED:
                reached += tl.where(inside, weight_of(scaled, best), 0)
            else:
                reached += inside.to(tl.int64)
        if tl.sum(reached, axis=0) >= wanted:
            low = middle
        else:
            high = middle - 1
    return logit_of_key(low)


@triton.jit
def _key_range(source, length, best, floor, temperature, first, last, BLOCK: tl.constexpr):
    low = tl.full((BLOCK,), 1 << 31, tl.int64)
    high = tl.full((BLOCK,), -(1 << 31), tl.int64)
    for start in range(0, length, BLOCK):
        scaled, inside = _candidates(
            source, length, start, best, floor, temperature, first, last, BLOCK
        )
        key = key_of(scaled)
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
        weight += tl.where(inside, weight_of(scaled, best), 0)
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
def _range_of(row, min_p_ptr, best_ptr, HAS_MIN_P: tl.constexpr):
    """The row's largest logit divided by temperature, and the smallest one that min-p keeps."""
    best = tl.load(best_ptr + row)
    floor = tl.full((), float("-inf"), tl.float32)
    if HAS_MIN_P:
        floor = best + tl.load(min_p_ptr + row)
    return best, floor


@triton.jit
def _bucket_of(scaled, best, temperature):
    """Bucket of a logit: 0 for the largest one, and monotonic in the distance from it."""
    distance = (best - scaled) * (temperature * _BUCKETS_PER_LOGIT)
    # Written so that NaN falls into the last bucket.
    return tl.where(distance < BUCKETS - 1, distance, BUCKETS - 1).to(tl.int32)
