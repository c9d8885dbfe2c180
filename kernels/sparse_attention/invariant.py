"""Batch-invariant sparse attention on CPU: matmuls of fixed shapes, in a fixed order."""

from __future__ import annotations

import torch

from kernels.linear.tiled import TiledWeight

_SPLIT_KEYS = 128
"""Number of keys per matmul."""


def invariant_products(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Dot products [n, L], in fp32, of queries [n, D] with keys [L, D]."""
    length, dim = keys.shape
    products = q.new_empty(len(q), length)
    for start in range(0, length, _SPLIT_KEYS):
        part = keys[start : start + _SPLIT_KEYS]
        padded = part.new_zeros(_SPLIT_KEYS, dim)
        padded[: len(part)] = part
        found = TiledWeight(padded).multiply(q, None)
        products[:, start : start + len(part)] = found[:, : len(part)]
    return products


def invariant_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scores [n, L], in fp32, of a row's queries [n, H, D] with weights [n, H], and its keys [L,
    D]."""
    products = invariant_products(q.flatten(0, 1), keys).relu_()
    # HAZARD(invariance): a sum over heads in one operation may depend on the batch.
    heads = products.view(*q.shape[:2], -1).unbind(1)
    scores = torch.zeros_like(heads[0])
    for head, weight in zip(heads, weights.unbind(1), strict=True):
        scores += head * weight.unsqueeze(1)
    return scores


def attend_invariantly(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of q [n, H, D] to keys [n, K, D] and values [n, K, D], with a mask [n, K] that is
    added to scores.

    HAZARD(invariance): the flash kernel computes each query with matmuls of the fixed shape H x K x
    D. A single query would not run in the thread pool, and the library might then split its
    matmuls.
    """
    count, num_heads = q.shape[:2]
    queries, keys, values = (x.unsqueeze(1) for x in (q, keys, values))
    mask = mask[:, None, None].expand(-1, -1, num_heads, -1)
    if count == 1:
        queries, keys, values, mask = (
            x.expand(2, -1, -1, -1) for x in (queries, keys, values, mask)
        )
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries.contiguous(), keys, values, 0.0, False, attn_mask=mask.contiguous(), scale=scale
    )
    found: torch.Tensor = out[:count, 0]
    return found
