"""Batch-invariant torch attention: a query's result depends, bitwise, only on its own keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention.torch_invariant_plan import (
    TILE_QUERIES,
    InvariantBlock,
    InvariantPlan,
    InvariantSplit,
)
from kernels.attention.values import has_latents, widened


@dataclass(frozen=True, slots=True)
class InvariantStep:
    """Planned attention of decodes or extends, whose queries the plan lays out in tiles."""

    plan: InvariantPlan

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        scale: float,
        sinks: torch.Tensor | None = None,
        value_scale: float = 1.0,
    ) -> torch.Tensor:
        """Computes the attention of tiles of queries over splits of keys; arguments as in
        AttentionStep."""
        num_q_heads, head_dim = q.shape[1:]
        num_kv_heads, value_dim = v_cache.shape[2:]
        if has_latents(k_cache, v_cache):
            v_cache = k_cache  # torch's flash kernel needs values as wide as keys
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for block in self.plan.blocks:
            rows = block.num_tiles * TILE_QUERIES
            tiles = torch.zeros(rows, num_q_heads, head_dim, dtype=q.dtype, device=q.device)
            tiles.index_copy_(0, block.places, q[block.start : block.stop])
            shape = (block.num_tiles, TILE_QUERIES, num_kv_heads, -1, head_dim)
            folded, lse = _fold(
                tiles.view(shape).transpose(1, 2).contiguous(),
                k_cache,
                v_cache,
                block,
                self.plan.split,
                scale,
                self.plan.has_window,
            )
            if sinks is not None:
                # The sink is added to the sum of exponentials over all splits, so it comes last.
                sink_scores = sinks.view(num_kv_heads, 1, -1)
                share = 1.0 / (1.0 + (sink_scores - lse.view(folded.shape[:-1])).exp())
                folded = (folded * share.unsqueeze(-1)).to(q.dtype)
            result = folded.transpose(1, 2).reshape(rows, num_q_heads, head_dim)
            torch.index_select(result, 0, block.places, out=out[block.start : block.stop])
        if value_scale != 1.0:
            out *= value_scale
        return out[..., :value_dim]


def _fold(
    tiles: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block: InvariantBlock,
    split: int,
    scale: float,
    has_window: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes a block's attention over its splits, and merges them in order.

    Returns:
        Output [tiles, Hkv, Q, G, D], shaped like `tiles`, and log-sum-exp [tiles, Hkv, Q * G].
    """
    queries = tiles.flatten(2, 3)
    out, lse = queries, queries[..., 0]
    if has_window:
        out = torch.zeros_like(queries)
        lse = torch.full(queries.shape[:-1], float("-inf"), device=queries.device)
    for index, part in enumerate(block.splits):
        part_out, part_lse = _attend_split(queries, k_cache, v_cache, part, split, scale)
        if index == 0 and not has_window:
            # Without a window, every tile attends to position 0, hence to the first split.
            out, lse = part_out.contiguous(), part_lse.contiguous()
        else:
            window = slice(part.first, part.stop)
            _merge(out[window], lse[window], part_out, part_lse)
    return out.view(tiles.shape), lse


def _attend_split(
    queries: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    part: InvariantSplit,
    split: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one split: output [n, Hkv, Q * G, D] and log-sum-exp [n, Hkv, Q * G].

    HAZARD(invariance): the flash kernel computes each (tile, KV head) with matmuls of the fixed
    shape Q * G x split x D, which must not depend on the batch.
    """
    queries = queries[part.first : part.stop]
    count, num_kv_heads, rows, head_dim = queries.shape
    k, v = (
        cache.view(cache.shape[0], -1)
        .index_select(0, part.pages)
        .to(queries.dtype)
        .view(-1, split, num_kv_heads, cache.shape[3])
        .transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    v = widened(v, head_dim)
    mask = part.mask.to(queries.dtype).expand(-1, -1, -1, rows // TILE_QUERIES, -1)
    mask = mask.reshape(count, 1, rows, split)
    # A single tile would not run in the thread pool, and the library might then split its matmul.
    padded = max(count, 2) if num_kv_heads == 1 else count
    queries, mask = queries.expand(padded, -1, -1, -1), mask.expand(padded, -1, -1, -1)
    k, v = k.expand(padded, -1, -1, -1), v.expand(padded, -1, -1, -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, k, v, 0.0, False, attn_mask=mask, scale=scale
    )
    return out[:count], lse[:count]


def _merge(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merges a partial output and its log-sum-exp into `out` and `lse`, in place."""
    highest = torch.maximum(lse, part_lse)
    weight, part_weight = (lse - highest).exp_(), (part_lse - highest).exp_()
    total = weight + part_weight
    out.mul_((weight / total).unsqueeze(-1)).add_(part_out * (part_weight / total).unsqueeze(-1))
    torch.add(highest, total.log_(), out=lse)
