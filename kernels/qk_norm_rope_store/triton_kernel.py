"""Triton QK norm, rotary embedding and store: one program per token and block of heads, either of
queries or of keys and values."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.qk_norm_rope_store import HeadNorms, qk_norm_rope_store
from kernels.registry import implements
from kernels.tiles import cdiv, next_power_of_2

_HEADS = 8
"""Maximum number of heads per program, chosen so that a prompt has few programs and a single token
has several."""
_BEFORE, _AFTER = tl.constexpr(1), tl.constexpr(2)
"""Values of NORM: norms before or after rotary embedding; 0 if there are none."""


@implements(qk_norm_rope_store, "triton")
def launch_qk_norm_rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
    *,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    norms: HeadNorms | None = None,
    query_scale: torch.Tensor | None = None,
    cache_scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """Launches a grid of (tokens, blocks of heads); queries are overwritten in place."""
    (num_tokens, num_q, width), num_k = q.shape, k.shape[1]
    if num_tokens == 0:
        return q
    rotates = cos_sin_cache is not None
    # Without rotary embedding, any split into halves will do.
    half = width // 2 if cos_sin_cache is None else cos_sin_cache.shape[1] // 2
    heads = min(_HEADS, next_power_of_2(max(num_q, num_k)))
    q_blocks = cdiv(num_q, heads)
    _prepare_kernel[(num_tokens, q_blocks + cdiv(num_k, heads))](
        q, k, v, *caches, slot_mapping, positions, q if cos_sin_cache is None else cos_sin_cache,
        q if norms is None else norms.q, q if norms is None else norms.k,
        0.0 if norms is None else norms.eps,
        q if query_scale is None else query_scale,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        0 if cos_sin_cache is None else cos_sin_cache.stride(0),
        1.0 / cache_scales[0], 1.0 / cache_scales[1],
        NUM_Q=num_q, NUM_K=num_k, Q_BLOCKS=q_blocks, HEADS=heads, WIDTH=width, HALF=half,
        VALUE_WIDTH=v.shape[2],
        ROTATES=rotates, NORM=0 if norms is None else 1 + norms.after_rotation,
        OF_VALUES=norms is not None and norms.of_values, HAS_SCALE=query_scale is not None,
        BLOCK_VALUE=next_power_of_2(v.shape[2]), BLOCK_HALF=next_power_of_2(half),
        BLOCK_REST=next_power_of_2(max(1, width - 2 * half)),
    )  # fmt: skip
    return q


# Slots and positions are views of the step's staged inputs: one binary serves all alignments.
@dependent_kernel(do_not_specialize_on_alignment=["slot_ptr", "position_ptr"])
def _prepare_kernel(
    q_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, position_ptr, table_ptr,
    q_weight_ptr, k_weight_ptr, eps, scale_ptr,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    table_stride, k_inverse, v_inverse,
    NUM_Q: tl.constexpr, NUM_K: tl.constexpr, Q_BLOCKS: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, HALF: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROTATES: tl.constexpr,
    NORM: tl.constexpr, OF_VALUES: tl.constexpr, HAS_SCALE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cos = tl.full((BLOCK_HALF,), 1.0, tl.float32)
    sin = tl.zeros((BLOCK_HALF,), tl.float32)
    if ROTATES:
        angle = tl.arange(0, BLOCK_HALF)
        row = table_ptr + tl.load(position_ptr + token) * table_stride
        cos = tl.load(row + angle, mask=angle < HALF, other=0.0)
        sin = tl.load(row + HALF + angle, mask=angle < HALF, other=0.0)
    if block < Q_BLOCKS:
        head = (block * HEADS + tl.arange(0, HEADS))[:, None]
        heads = q_ptr + token * q_token_stride + head * q_head_stride
        factor = 1.0
        if HAS_SCALE:
            factor = tl.load(scale_ptr + tl.load(position_ptr + token))
        _finish(
            heads, heads, head < NUM_Q, q_weight_ptr, eps, cos, sin, factor, 1.0,
            WIDTH, HALF, ROTATES, NORM, HAS_SCALE, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        head = ((block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS))[:, None]
        cell = tl.load(slot_ptr + token) * NUM_K + head
        _finish(
            k_ptr + token * k_token_stride + head * k_head_stride, k_cache_ptr + cell * WIDTH,
            head < NUM_K, k_weight_ptr, eps, cos, sin, 1.0, k_inverse,
            WIDTH, HALF, ROTATES, NORM, False, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
        column = tl.arange(0, BLOCK_VALUE)[None, :]
        inside = (head < NUM_K) & (column < VALUE_WIDTH)
        source = v_ptr + token * v_token_stride + head * v_head_stride + column
        values = tl.load(source, mask=inside, other=0.0)
        if OF_VALUES:
            wide = values.to(tl.float32)
            mean = tl.sum(wide * wide, axis=1) / VALUE_WIDTH
            values = (wide * (1.0 / tl.sqrt(mean + eps))[:, None]).to(values.dtype)
        target = v_cache_ptr + cell * VALUE_WIDTH + column
        tl.store(target, to_cache(values, target.dtype.element_ty, v_inverse), mask=inside)


@triton.jit
def _finish(
    source, target, exists, weight_ptr, eps, cos, sin, factor, inverse,
    WIDTH: tl.constexpr, HALF: tl.constexpr, ROTATES: tl.constexpr, NORM: tl.constexpr,
    SCALES: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Applies norm, rotary embedding and factor to heads [HEADS, 1], and stores them, in three
    parts: the two halves of rotary dimensions, and the rest. Source and target may be the same,
    since each thread reads the elements that it overwrites. FP8 targets receive the heads times
    `inverse`."""
    first = tl.arange(0, BLOCK_HALF)[None, :]
    second = HALF + first
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    half_inside, rest_inside = exists & (first < HALF), exists & (rest < WIDTH)
    x = tl.load(source + first, mask=half_inside, other=0.0)
    y = tl.load(source + second, mask=half_inside, other=0.0)
    z = tl.load(source + rest, mask=rest_inside, other=0.0)
    if NORM == _BEFORE:
        x, y, z = _normalise(x, y, z, weight_ptr, eps, WIDTH, HALF, BLOCK_HALF, BLOCK_REST)
    if ROTATES:
        a, b = x.to(tl.float32), y.to(tl.float32)
        x = (a * cos[None, :] - b * sin[None, :]).to(z.dtype)
        y = (b * cos[None, :] + a * sin[None, :]).to(z.dtype)
    if NORM == _AFTER:
        x, y, z = _normalise(x, y, z, weight_ptr, eps, WIDTH, HALF, BLOCK_HALF, BLOCK_REST)
    if SCALES:
        rounded = factor.to(z.dtype).to(tl.float32)
        x = (x.to(tl.float32) * rounded).to(z.dtype)
        y = (y.to(tl.float32) * rounded).to(z.dtype)
        z = (z.to(tl.float32) * rounded).to(z.dtype)
    kept = target.dtype.element_ty
    tl.store(target + first, to_cache(x, kept, inverse), mask=half_inside)
    tl.store(target + second, to_cache(y, kept, inverse), mask=half_inside)
    tl.store(target + rest, to_cache(z, kept, inverse), mask=rest_inside)


@triton.jit
def to_cache(x, DTYPE: tl.constexpr, inverse):
    """Converts values to the dtype of a cache. For FP8, they are first multiplied by `inverse` and
    clamped to the range of e4m3."""
    if DTYPE.is_fp8():
        x = tl.clamp(x.to(tl.float32) * inverse, -448.0, 448.0)
    return x.to(DTYPE)


@triton.jit
def _normalise(
    x, y, z, weight_ptr, eps,
    WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    a, b, c = x.to(tl.float32), y.to(tl.float32), z.to(tl.float32)
    squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(c * c, axis=1)
    factor = (1.0 / tl.sqrt(squares / WIDTH + eps))[:, None]
    first = tl.arange(0, BLOCK_HALF)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    x_weight = tl.load(weight_ptr + first, mask=first < HALF, other=0.0)
    y_weight = tl.load(weight_ptr + HALF + first, mask=first < HALF, other=0.0)
    z_weight = tl.load(weight_ptr + rest, mask=rest < WIDTH, other=0.0)
    return (
        _scale(a * factor, x_weight, z.dtype),
        _scale(b * factor, y_weight, z.dtype),
        _scale(c * factor, z_weight, z.dtype),
    )


@triton.jit
def _scale(normalised, weight, DTYPE: tl.constexpr):
    """Multiplies by the weight, rounding before and after, like `rms_norm`."""
    rounded = normalised.to(DTYPE).to(tl.float32)
    return (rounded * weight.to(tl.float32)[None, :]).to(DTYPE)
