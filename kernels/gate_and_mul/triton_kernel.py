"""Triton gated activations: one kernel, compiled for each activation."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.gate_and_mul import (
    clamped_silu_and_mul,
    clamped_swiglu,
    gelu_and_mul,
    silu_and_mul,
)
from kernels.registry import implements
from kernels.rowwise import CUBIC, SLOPE
from kernels.tiles import cdiv

_BLOCK = 1024
_CUBIC, _SLOPE = tl.constexpr(CUBIC), tl.constexpr(SLOPE)


@implements(silu_and_mul, "triton")
def launch_silu(x: torch.Tensor) -> torch.Tensor:
    """Launches a grid of (tokens, blocks of columns)."""
    return _gate(x, "silu")


@implements(gelu_and_mul, "triton")
def launch_gelu(x: torch.Tensor) -> torch.Tensor:
    """Launches a grid of (tokens, blocks of columns)."""
    return _gate(x, "gelu")


@implements(clamped_silu_and_mul, "triton")
def launch_clamped_silu(x: torch.Tensor, limit: float) -> torch.Tensor:
    """Launches a grid of (tokens, blocks of columns)."""
    return _gate(x, "clamped silu", limit=limit)


@implements(clamped_swiglu, "triton")
def launch_clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Launches a grid of (tokens, blocks of columns)."""
    return _gate(x, "clamped", alpha, limit)


def _gate(x: torch.Tensor, activation: str, alpha: float = 0.0, limit: float = 0.0) -> torch.Tensor:
    num_tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if num_tokens:
        grid = (num_tokens, cdiv(width, _BLOCK))
        _gate_and_mul_kernel[grid](
            x, out, x.stride(0),
            ACTIVATION=activation, ALPHA=alpha, LIMIT=limit, WIDTH=width, BLOCK=_BLOCK,
        )  # fmt: skip
    return out


@dependent_kernel
def _gate_and_mul_kernel(
    x_ptr, out_ptr, x_stride, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * x_stride + WIDTH + column, mask=inside, other=0.0)
    result = activated(gate, up.to(tl.float32), ACTIVATION, ALPHA, LIMIT)
    tl.store(out_ptr + token * WIDTH + column, result.to(up.dtype), mask=inside)


@triton.jit
def activated(
    gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """Gated activation of gate and up, in fp32; only clamped activations use ALPHA and LIMIT."""
    if ACTIVATION == "silu":
        result = gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu":
        slope = _SLOPE * gate * (1.0 + _CUBIC * gate * gate)
        result = gate / (1.0 + tl.exp(-slope)) * up
    elif ACTIVATION == "clamped silu":
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        result = tl.minimum(gate / (1.0 + tl.exp(-gate)), LIMIT) * up
    else:
        tl.static_assert(ACTIVATION == "clamped")
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        result = (up + 1.0) * gate / (1.0 + tl.exp(-ALPHA * gate))
    return result
