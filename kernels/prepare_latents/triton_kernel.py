"""Triton preparation of latent attention: for each token, programs with a block of query heads
each, and one for the cache."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.prepare_latents import LatentRows, prepare_latents
from kernels.qk_norm_rope_store.triton_kernel import to_cache
from kernels.registry import implements
from kernels.rms_norm.triton_kernel import normalise
from kernels.tiles import cdiv, next_power_of_2

_HEADS = 16
"""Maximum number of heads per program, chosen so that a prompt has few programs and a single token
has several."""


@implements(prepare_latents, "triton")
def launch_prepare_latents(
    q: torch.Tensor,
    queries: torch.Tensor | None,
    rows: LatentRows,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    query_scale: torch.Tensor | None = None,
    cache_scale: float = 1.0,
) -> None:
    """Launches a grid of (tokens, blocks of heads plus one for the cache)."""
    num_tokens, num_heads, query_dim = q.shape
    if not num_tokens:
        return
    value_dim, half = rows.latents.shape[1], rows.rotating.shape[1] // 2
    plain = query_dim - 2 * half
    heads = min(_HEADS, next_power_of_2(num_heads))
    table = q if cos_sin_cache is None else cos_sin_cache
    _prepare_latents_kernel[(num_tokens, cdiv(num_heads, heads) + 1)](
        q, q if queries is None else queries, rows.latents, rows.rotating, rows.weight, rows.eps,
        cache, slot_mapping, positions, table, q if query_scale is None else query_scale,
        q.stride(0), q.stride(1), rows.latents.stride(0), rows.rotating.stride(0),
        table.stride(0), 1.0 / cache_scale,
        NUM_HEADS=num_heads, HEADS=heads, PLAIN=plain, VALUE_DIM=value_dim, HALF=half,
        ROTATES=cos_sin_cache is not None, HAS_SCALE=query_scale is not None,
        IN_PLACE=queries is None, BLOCK_PLAIN=next_power_of_2(plain),
        BLOCK_V=next_power_of_2(value_dim), BLOCK_HALF=next_power_of_2(half),
    )  # fmt: skip


# Slots and positions are views of the step's staged inputs: one binary serves all alignments.
@dependent_kernel(do_not_specialize_on_alignment=["slot_ptr", "position_ptr"])
def _prepare_latents_kernel(
    q_ptr, queries_ptr, latent_ptr, rotating_ptr, weight_ptr, eps, cache_ptr, slot_ptr,
    position_ptr, table_ptr, scale_ptr,
    q_token_stride, q_head_stride, latent_stride, rotating_stride, table_stride, inverse,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, PLAIN: tl.constexpr, VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr, ROTATES: tl.constexpr, HAS_SCALE: tl.constexpr, IN_PLACE: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    KEPT: tl.constexpr = VALUE_DIM + 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = tl.load(position_ptr + token)
    angle = tl.arange(0, BLOCK_HALF)
    turns = angle < HALF
    if ROTATES:
        row = table_ptr + position * table_stride
        cos = tl.load(row + angle, mask=turns, other=0.0)
        sin = tl.load(row + HALF + angle, mask=turns, other=0.0)
    else:
        cos = tl.full([BLOCK_HALF], 1.0, tl.float32)
        sin = tl.zeros([BLOCK_HALF], tl.float32)
    if block == tl.num_programs(1) - 1:
        column = tl.arange(0, BLOCK_V)
        inside = column < VALUE_DIM
        latents = tl.load(latent_ptr + token * latent_stride + column, mask=inside, other=0.0)
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
        cell = cache_ptr + tl.load(slot_ptr + token) * KEPT
        kept = cell.dtype.element_ty
        normalised = normalise(latents, weight, eps, VALUE_DIM)
        tl.store(cell + column, to_cache(normalised, kept, inverse), mask=inside)
        key = rotating_ptr + token * rotating_stride + angle
        key_first, key_second = _rotated(key, turns, cos, sin, HALF)
        rotary = cell + VALUE_DIM + angle
        tl.store(rotary, to_cache(key_first, kept, inverse), mask=turns)
        tl.store(rotary + HALF, to_cache(key_second, kept, inverse), mask=turns)
    else:
        head = (block * HEADS + tl.arange(0, HEADS))[:, None]
        exists = head < NUM_HEADS
        heads = q_ptr + token * q_token_stride + head * q_head_stride
        source = heads + PLAIN + angle[None, :]
        here = exists & turns[None, :]
        first, second = _rotated(source, here, cos[None, :], sin[None, :], HALF)
        if HAS_SCALE:
            factor = tl.load(scale_ptr + position).to(first.dtype)
            first, second = _scaled(first, factor), _scaled(second, factor)
            place = tl.arange(0, BLOCK_PLAIN)[None, :]
            plain = exists & (place < PLAIN)
            own = tl.load(heads + place, mask=plain, other=0.0)
            tl.store(heads + place, _scaled(own, factor), mask=plain)
        target = source
        if not IN_PLACE:
            target = queries_ptr + (token * NUM_HEADS + head) * KEPT + VALUE_DIM + angle[None, :]
        tl.store(target, first, mask=here)
        tl.store(target + HALF, second, mask=here)


@triton.jit
def _rotated(source, inside, cos, sin, HALF: tl.constexpr):
    """Loads the two halves of rotary dimensions and rotates them."""
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HALF, mask=inside, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    return (x * cos - y * sin).to(first.dtype), (y * cos + x * sin).to(first.dtype)


@triton.jit
def _scaled(x, factor):
    return (x.to(tl.float32) * factor.to(tl.float32)).to(x.dtype)
