"""Triton rotary embedding: one program per token rotates all heads of q and k."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.tiles import next_power_of_2


def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> None:
    """Launch over tokens, in place."""
    num_tokens = q.shape[0]
    if num_tokens == 0:
        return
    half = cos_sin_cache.shape[1] // 2
    _rotary_kernel[(num_tokens,)](
        q, k, positions, cos_sin_cache,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos_sin_cache.stride(0),
        NUM_Q=q.shape[1], NUM_K=k.shape[1], HALF=half,
        BLOCK_Q=next_power_of_2(q.shape[1]),
        BLOCK_K=next_power_of_2(k.shape[1]),
        BLOCK_HALF=next_power_of_2(half),
    )  # fmt: skip


# Positions are a view into the step's staged inputs: wherever they lie, one binary serves.
@triton.jit(do_not_specialize_on_alignment=["position_ptr"])
def _rotary_kernel(
    q_ptr, k_ptr, position_ptr, cache_ptr,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, cache_stride,
    NUM_Q: tl.constexpr, NUM_K: tl.constexpr, HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + token)
    column = tl.arange(0, BLOCK_HALF)
    inside = column < HALF
    cos = tl.load(cache_ptr + position * cache_stride + column, mask=inside, other=0.0)
    sin = tl.load(cache_ptr + position * cache_stride + HALF + column, mask=inside, other=0.0)
    _rotate(
        q_ptr + token * q_token_stride, q_head_stride, cos, sin, NUM_Q, HALF, BLOCK_Q, BLOCK_HALF
    )
    _rotate(
        k_ptr + token * k_token_stride, k_head_stride, cos, sin, NUM_K, HALF, BLOCK_K, BLOCK_HALF
    )


@triton.jit
def _rotate(
    row_ptr, head_stride, cos, sin,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < NUM_HEADS) & (column < HALF)
    first_ptr = row_ptr + head * head_stride + column
    second_ptr = first_ptr + HALF
    first = tl.load(first_ptr, mask=inside, other=0.0)
    second = tl.load(second_ptr, mask=inside, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    cos, sin = cos[None, :], sin[None, :]
    tl.store(first_ptr, (x * cos - y * sin).to(first.dtype), mask=inside)
    tl.store(second_ptr, (y * cos + x * sin).to(second.dtype), mask=inside)
