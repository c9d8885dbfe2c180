"""Triton fused addition and norms: one program per row, which is read once."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.fused_add_norm import Norm, fused_add_norm, fused_add_norm_fp8
from kernels.fused_add_norm.base import check_norms
from kernels.quantize_fp8 import Fp8Rows
from kernels.quantize_fp8.base import BLOCK as FP8_BLOCK
from kernels.quantize_fp8.base import empty_rows
from kernels.quantize_fp8.triton_kernel import store_fp8
from kernels.registry import implements
from kernels.rms_norm.triton_kernel import normalise
from kernels.tiles import count_warps, next_power_of_2


@implements(fused_add_norm, "triton")
def launch_fused_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norms: Sequence[Norm],
    eps: float,
    *,
    x_weight: torch.Tensor | None = None,
    residual_weight: torch.Tensor | None = None,
    x_scale: float = 1.0,
    total_scale: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Launches one program per token; rows of x and residual are contiguous."""
    check_norms(residual, norms, x_weight, total_scale)
    num_tokens, width = x.shape
    outs = tuple(
        torch.empty(x.shape, dtype=torch.float32 if norm.is_fp32 else x.dtype, device=x.device)
        for norm in norms
    )
    total = x
    if residual is not None:
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return outs, total
    pairs = [(out, norm.weight) for out, norm in zip(outs, norms, strict=True)]
    first, second, third = [*pairs, *[(x, x)] * (3 - len(pairs))]
    bias = norms[0].bias if norms else None
    _fused_add_norm_kernel[(num_tokens,)](
        x, x if residual is None else residual, total,
        x.stride(0), 0 if residual is None else residual.stride(0),
        eps, x_scale, x if total_scale is None else total_scale,
        x if x_weight is None else x_weight, x if residual_weight is None else residual_weight,
        *first, x if bias is None else bias, *second, *third,
        HAS_RESIDUAL=residual is not None, HAS_X_WEIGHT=x_weight is not None,
        HAS_RESIDUAL_WEIGHT=residual_weight is not None, SCALES_X=x_scale != 1.0,
        SCALES_TOTAL=total_scale is not None, NUM_NORMS=len(norms),
        SUBTRACTS_MEAN=any(norm.subtracts_mean for norm in norms), HAS_BIAS=bias is not None,
        WIDTH=width, BLOCK=next_power_of_2(width), num_warps=count_warps(width),
    )  # fmt: skip
    return outs, total


@implements(fused_add_norm_fp8, "triton")
def launch_fused_add_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    eps: float,
    *,
    by_block: bool,
    x_weight: torch.Tensor | None = None,
    x_scale: float = 1.0,
) -> tuple[Fp8Rows, torch.Tensor]:
    """Launches one program per row of the result; rows of x and residual are contiguous."""
    check_norms(residual, (norm,), x_weight, None)
    num_tokens, width = x.shape
    out = empty_rows(num_tokens, width, by_block=by_block, device=x.device)
    count, depth = out.codes.shape
    total = x
    if residual is not None:
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = next_power_of_2(depth)
    if num_tokens:
        _fused_add_norm_fp8_kernel[(count,)](
            x, x if residual is None else residual, total,
            x.stride(0), 0 if residual is None else residual.stride(0),
            eps, x_scale, x if x_weight is None else x_weight,
            norm.weight, norm.weight if norm.bias is None else norm.bias,
            out.codes, out.scales, num_tokens, count,
            HAS_RESIDUAL=residual is not None, HAS_X_WEIGHT=x_weight is not None,
            SCALES_X=x_scale != 1.0, SUBTRACTS_MEAN=norm.subtracts_mean,
            HAS_BIAS=norm.bias is not None, WIDTH=width, DEPTH=depth,
            GROUP=FP8_BLOCK if by_block else block, BLOCK=block, num_warps=count_warps(width),
        )  # fmt: skip
    return out, total


@dependent_kernel
def _fused_add_norm_kernel(
    x_ptr, residual_ptr, total_ptr, x_stride, residual_stride, eps, x_scale, total_scale_ptr,
    x_weight_ptr, residual_weight_ptr,
    out_ptr, weight_ptr, bias_ptr, second_out_ptr, second_weight_ptr, third_out_ptr,
    third_weight_ptr,
    HAS_RESIDUAL: tl.constexpr, HAS_X_WEIGHT: tl.constexpr, HAS_RESIDUAL_WEIGHT: tl.constexpr,
    SCALES_X: tl.constexpr, SCALES_TOTAL: tl.constexpr, NUM_NORMS: tl.constexpr,
    SUBTRACTS_MEAN: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = token * WIDTH + column
    total = _sum_row(
        x_ptr + token * x_stride + column, residual_ptr + token * residual_stride + column, eps,
        x_scale, x_weight_ptr + column, residual_weight_ptr + column, inside,
        HAS_RESIDUAL, HAS_X_WEIGHT, HAS_RESIDUAL_WEIGHT, SCALES_X, WIDTH,
    )  # fmt: skip
    if HAS_RESIDUAL:
        kept = total
        if SCALES_TOTAL:
            factor = tl.load(total_scale_ptr).to(tl.float32)
            kept = (total.to(tl.float32) * factor).to(total.dtype)
        tl.store(total_ptr + place, kept, mask=inside)
    if NUM_NORMS > 0:
        row = _normalised(total, eps, inside, SUBTRACTS_MEAN, WIDTH)
        _store(
            out_ptr + place, row, weight_ptr + column, bias_ptr + column, inside, HAS_BIAS,
            total.dtype,
        )  # fmt: skip
        if NUM_NORMS > 1:
            weights = second_weight_ptr + column
            _store(second_out_ptr + place, row, weights, weights, inside, False, total.dtype)
        if NUM_NORMS > 2:
            weights = third_weight_ptr + column
            _store(third_out_ptr + place, row, weights, weights, inside, False, total.dtype)


# Not specialized on the number of rows.
@dependent_kernel(do_not_specialize=["rows", "count"])
def _fused_add_norm_fp8_kernel(
    x_ptr, residual_ptr, total_ptr, x_stride, residual_stride, eps, x_scale, x_weight_ptr,
    weight_ptr, bias_ptr, code_ptr, scale_ptr, rows, count,
    HAS_RESIDUAL: tl.constexpr, HAS_X_WEIGHT: tl.constexpr, SCALES_X: tl.constexpr,
    SUBTRACTS_MEAN: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = (column < WIDTH) & (token < rows)
    total = _sum_row(
        x_ptr + token * x_stride + column, residual_ptr + token * residual_stride + column, eps,
        x_scale, x_weight_ptr + column, x_weight_ptr, inside,
        HAS_RESIDUAL, HAS_X_WEIGHT, False, SCALES_X, WIDTH,
    )  # fmt: skip
    if HAS_RESIDUAL:
        tl.store(total_ptr + token * WIDTH + column, total, mask=inside)
    row = _normalised(total, eps, inside, SUBTRACTS_MEAN, WIDTH)
    row = _weighted(
        row, weight_ptr + column, bias_ptr + column, inside, HAS_BIAS, total.dtype
    ).to(tl.float32)  # fmt: skip
    store_fp8(row, code_ptr, scale_ptr, token, 0, count, DEPTH, GROUP, BLOCK)


@triton.jit
def _sum_row(
    x, residual, eps, x_scale, x_weights, residual_weights, inside,
    HAS_RESIDUAL: tl.constexpr, HAS_X_WEIGHT: tl.constexpr, HAS_RESIDUAL_WEIGHT: tl.constexpr,
    SCALES_X: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sum of a row of x and a row of the residual, in the dtype of x, from pointers to both."""
    total = tl.load(x, mask=inside, other=0.0)
    if HAS_X_WEIGHT:
        total = normalise(total, tl.load(x_weights, mask=inside, other=0.0), eps, WIDTH)
    if SCALES_X:
        total = (total.to(tl.float32) * x_scale).to(total.dtype)
    if HAS_RESIDUAL:
        added = tl.load(residual, mask=inside, other=0.0)
        if HAS_RESIDUAL_WEIGHT:
            weight = tl.load(residual_weights, mask=inside, other=0.0)
            added = normalise(added, weight, eps, WIDTH)
        # Rounded to the storage type before norms read it, as the unfused ops do.
        total = (total.to(tl.float32) + added.to(tl.float32)).to(total.dtype)
    return total


@triton.jit
def _normalised(total, eps, inside, SUBTRACTS_MEAN: tl.constexpr, WIDTH: tl.constexpr):
    """The normalized row in fp32, before the norm's weight is applied."""
    row = total.to(tl.float32)
    if SUBTRACTS_MEAN:
        row = tl.where(inside, row - tl.sum(row, axis=0) / WIDTH, 0.0)
    row = row * (1.0 / tl.sqrt(tl.sum(row * row, axis=0) / WIDTH + eps))
    if not SUBTRACTS_MEAN:
        row = row.to(total.dtype).to(tl.float32)
    return row


@triton.jit
def _store(
    target, row, weights, biases, inside, HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Stores a normalized row times the weight, plus the bias, rounded to the dtype of the rows."""
    result = _weighted(row, weights, biases, inside, HAS_BIAS, DTYPE)
    tl.store(target, result.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _weighted(row, weights, biases, inside, HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr):
    """A normalized row times the weight, plus the bias, rounded to the dtype of the rows."""
    result = row * tl.load(weights, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(biases, mask=inside, other=0.0).to(tl.float32)
    return result.to(DTYPE)
