"""Triton clamped SwiGLU."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.tiles import cdiv

_BLOCK = 1024


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Launch over (tokens, blocks of columns)."""
    num_tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if num_tokens:
        grid = (num_tokens, cdiv(width, _BLOCK))
        _clamped_swiglu_kernel[grid](
            x, out, x.stride(0), ALPHA=alpha, LIMIT=limit, WIDTH=width, BLOCK=_BLOCK
        )
    return out


@triton.jit
def _clamped_swiglu_kernel(
    x_ptr, out_ptr, x_stride, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    raw = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0)
    up = tl.load(x_ptr + token * x_stride + WIDTH + column, mask=inside, other=0.0)
    result = clamped_swiglu_of(raw.to(tl.float32), up.to(tl.float32), ALPHA, LIMIT)
    tl.store(out_ptr + token * WIDTH + column, result.to(raw.dtype), mask=inside)


@triton.jit
def clamped_swiglu_of(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """(u + 1) * g * sigmoid(alpha * g), of fp32, where both are clamped before."""
    gate = tl.minimum(gate, LIMIT)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return (up + 1.0) * gate / (1.0 + tl.exp(-ALPHA * gate))
