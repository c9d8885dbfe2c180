"""Triton RMSNorm: one program per normalized row."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.registry import implements
from kernels.rms_norm import rms_norm, rms_norm_pair
from kernels.tiles import count_warps, next_power_of_2


@implements(rms_norm, "triton")
def launch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Launches a grid of (tokens, heads); [T, H] counts as one head."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_tokens, width = x.shape[0], x.shape[-1]
    num_heads = x.shape[1] if x.dim() == 3 else 1
    if num_tokens == 0:
        return out
    head_stride = x.stride(1) if x.dim() == 3 else 0
    _rms_norm_kernel[(num_tokens, num_heads)](
        x, weight, out, x.stride(0), head_stride, eps,
        WIDTH=width, BLOCK=next_power_of_2(width), num_warps=count_warps(width),
    )  # fmt: skip
    return out


@implements(rms_norm_pair, "triton")
def launch_rms_norm_pair(
    first: torch.Tensor,
    second: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches a grid of (tokens, 2)."""
    outs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (first, second))
    num_tokens, widths = len(first), (first.shape[1], second.shape[1])
    if num_tokens:
        _rms_norm_pair_kernel[(num_tokens, 2)](
            first, weights[0], outs[0], first.stride(0),
            second, weights[1], outs[1], second.stride(0), eps,
            WIDTH=widths[0], BLOCK=next_power_of_2(widths[0]),
            SECOND_WIDTH=widths[1], SECOND_BLOCK=next_power_of_2(widths[1]),
            num_warps=count_warps(max(widths)),
        )  # fmt: skip
    return outs[0], outs[1]


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, token_stride, head_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = token * tl.num_programs(1) + head
    source = x_ptr + token * token_stride + head * head_stride
    _normalise_row(source, weight_ptr, out_ptr + row * WIDTH, eps, WIDTH, BLOCK)


@triton.jit
def _rms_norm_pair_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride,
    second_ptr, second_weight_ptr, second_out_ptr, second_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SECOND_WIDTH: tl.constexpr, SECOND_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        source, target = x_ptr + token * x_stride, out_ptr + token * WIDTH
        _normalise_row(source, weight_ptr, target, eps, WIDTH, BLOCK)
    else:
        source = second_ptr + token * second_stride
        target = second_out_ptr + token * SECOND_WIDTH
        _normalise_row(source, second_weight_ptr, target, eps, SECOND_WIDTH, SECOND_BLOCK)


@triton.jit
def _normalise_row(
    source, weight_ptr, target, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(source + column, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    tl.store(target + column, normalise(x, weight, eps, WIDTH), mask=inside)


@triton.jit
def normalise(x, weight, eps, WIDTH: tl.constexpr):
    """A row divided by its root mean square, rounded, and multiplied by the weight."""
    x_fp32 = x.to(tl.float32)
    mean_square = tl.sum(x_fp32 * x_fp32, axis=0) / WIDTH
    normalised = (x_fp32 * (1.0 / tl.sqrt(mean_square + eps))).to(x.dtype)
    return (normalised.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
