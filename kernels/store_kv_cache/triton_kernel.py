"""Triton KV store: one program per token copies its keys and values."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.tiles import next_power_of_2


def store_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Launch over tokens; a token's heads must lie side by side."""
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    assert k.stride(1) == head_dim, "the heads of k must lie side by side"
    assert v.stride(1) == head_dim, "the heads of v must lie side by side"
    width = num_kv_heads * head_dim
    _store_kernel[(num_tokens,)](
        k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0),
        WIDTH=width, BLOCK=next_power_of_2(width),
    )  # fmt: skip


# Slots are a view into the step's staged inputs: wherever they lie, one binary serves.
@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def _store_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_stride, v_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    k = tl.load(k_ptr + token * k_stride + column, mask=inside)
    v = tl.load(v_ptr + token * v_stride + column, mask=inside)
    tl.store(k_cache_ptr + slot * WIDTH + column, k, mask=inside)
    tl.store(v_cache_ptr + slot * WIDTH + column, v, mask=inside)
