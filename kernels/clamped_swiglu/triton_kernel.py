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
    gate = tl.minimum(raw.to(tl.float32), LIMIT)
    up = tl.load(x_ptr + token * x_stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    result = (up + 1.0) * gate / (1.0 + tl.exp(-ALPHA * gate))
    tl.store(out_ptr + token * WIDTH + column, result.to(raw.dtype), mask=inside)
