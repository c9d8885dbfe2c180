"""Triton SiLU-and-multiply."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.tiles import cdiv

_BLOCK = 1024


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Launch over (tokens, blocks of columns)."""
    num_tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if num_tokens:
        grid = (num_tokens, cdiv(width, _BLOCK))
        _silu_and_mul_kernel[grid](x, out, x.stride(0), WIDTH=width, BLOCK=_BLOCK)
    return out


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * x_stride + WIDTH + column, mask=inside, other=0.0)
    result = silu_times(gate, up.to(tl.float32))
    tl.store(out_ptr + token * WIDTH + column, result.to(up.dtype), mask=inside)


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up, of fp32."""
    return gate / (1.0 + tl.exp(-gate)) * up
