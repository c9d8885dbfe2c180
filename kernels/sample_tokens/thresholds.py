"""Thresholds of top-k and top-p: the smallest logits that they keep, found without sorting.

HAZARD(invariance): weights are integers, whose sums do not depend on their order: a row's threshold
does not depend on other rows or on how a device splits the sum. Floating-point sums would differ.
"""

from __future__ import annotations

import torch

WEIGHT_BITS = 40
"""Number of fractional bits: the most likely token weighs 2**40, and the sum over 2**22 tokens fits
in 63 bits."""

NARROW = 64
"""Maximum k for `topk`, which is fast for small k."""

_CACHED_WEIGHTS = 1 << 17

_DIGITS = ((21, 11), (10, 11), (0, 10))
"""Digits of a radix search over 32 bits, highest first: (lowest bit, number of bits)."""


def integer_weights(logits: torch.Tensor) -> torch.Tensor:
    """Unnormalized probabilities of fp32 logits [R, vocab], in fixed point: int64 [R, vocab]."""
    weights = logits - logits.amax(dim=-1, keepdim=True)
    return weights.exp_().mul_(2.0**WEIGHT_BITS).long()


def total_weight(logits: torch.Tensor) -> torch.Tensor:
    """Sum of the integer weights of each row, [R]."""
    return torch.cat([integer_weights(rows).sum(dim=-1) for rows in _cached_rows(logits)])


def top_k_threshold(logits: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """The k-th largest logit of each row, [R]; -inf if `top_k` is 0. `max_top_k` is an upper bound
    of `top_k`."""
    vocab_size = logits.shape[-1]
    counts = top_k.clamp(min=1, max=vocab_size)
    if max_top_k <= NARROW:
        largest = logits.topk(min(max_top_k, vocab_size), dim=-1).values
        threshold = largest.gather(1, counts.unsqueeze(1) - 1).squeeze(1)
    else:
        threshold = weighted_threshold(logits, torch.ones_like(logits, dtype=torch.int64), counts)
    return threshold.masked_fill_(top_k == 0, float("-inf"))


def top_p_threshold(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest logit in each row's nucleus, [R]; -inf if `top_p` is 1."""
    blocks = _cached_rows(logits)
    shares = torch.split(top_p, blocks[0].shape[0])
    return torch.cat([_nucleus(rows, own) for rows, own in zip(blocks, shares, strict=True)])


def _nucleus(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    weights = integer_weights(logits)
    total = weights.sum(dim=-1)
    targets = (top_p.double() * total.double()).ceil_().long().clamp_(min=1)
    if logits.is_cuda:  # selecting rows would synchronize
        threshold = weighted_threshold(logits, weights, targets)
    else:
        threshold, is_reached = _narrow_threshold(logits, weights, targets)
        (flat,) = (~is_reached & (top_p < 1.0)).nonzero(as_tuple=True)
        if len(flat):
            threshold[flat] = weighted_threshold(logits[flat], weights[flat], targets[flat])
    return threshold.masked_fill_(top_p >= 1.0, float("-inf"))


def _cached_rows(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Blocks of rows that are computed at a time: a single one on CUDA; on CPU, blocks whose
    weights fit in a core's cache."""
    if logits.is_cuda:
        return (logits,)
    return torch.split(logits, max(1, _CACHED_WEIGHTS // logits.shape[-1]))


def weighted_threshold(
    logits: torch.Tensor, weights: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The largest logit t of each row for which the total weight of tokens with logits >= t reaches
    the target.

    This is a radix search over the bits of the logits: a histogram over the highest bits yields a
    bucket, a histogram over the next bits yields a bucket within it, and so on.

    Args:
        logits: fp32 [R, vocab].
        weights: int64 [R, vocab], non-negative.
        targets: int64 [R], at least 1 and at most the sum of the row's weights.
    """
    keys = _ordered_keys(logits)
    found = torch.zeros_like(targets)
    for shift, num_bits in _DIGITS:
        buckets = (keys >> shift) & ((1 << num_bits) - 1)
        digit, targets = _pick_bucket(buckets, weights, targets, 1 << num_bits)
        found |= digit << shift
        inside = buckets == digit.unsqueeze(1)
        if len(keys) == 1 and not keys.is_cuda:  # other tokens can be dropped without synchronizing
            keys, weights = keys[inside].unsqueeze(0), weights[inside].unsqueeze(0)
        else:
            weights = torch.where(inside, weights, 0)
    return _logits_of_keys(found)


def _narrow_threshold(
    logits: torch.Tensor, weights: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The threshold within the NARROW most likely tokens, and whether they reach the target."""
    likeliest, tokens = logits.topk(min(NARROW, logits.shape[-1]), dim=-1)
    cumulative = weights.gather(1, tokens).cumsum_(dim=-1)
    num_before = (cumulative[:, :-1] < targets.unsqueeze(1)).sum(dim=-1, keepdim=True)
    return likeliest.gather(1, num_before).squeeze(1), cumulative[:, -1] >= targets


def _pick_bucket(
    buckets: torch.Tensor, weights: torch.Tensor, targets: torch.Tensor, num_buckets: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bucket in which the sum of weights from the top reaches the target, and the target within
    that bucket."""
    histogram = torch.zeros(buckets.shape[0], num_buckets, dtype=torch.int64, device=buckets.device)
    # Buckets are counted from the top.
    histogram.scatter_add_(1, num_buckets - 1 - buckets, weights)
    reached = histogram.cumsum(dim=-1)
    place = (reached[:, :-1] < targets.unsqueeze(1)).sum(dim=-1, keepdim=True)
    before = reached.gather(1, place) - histogram.gather(1, place)
    return num_buckets - 1 - place.squeeze(1), targets - before.squeeze(1)


def _ordered_keys(logits: torch.Tensor) -> torch.Tensor:
    """Maps fp32 logits to int64 keys in [0, 2**32), in the same order."""
    bits = logits.contiguous().view(torch.int32)
    # Bits of negative floats are in reverse order.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.long().add_(1 << 31)


def _logits_of_keys(keys: torch.Tensor) -> torch.Tensor:
    ordered = (keys - (1 << 31)).int()
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
