"""Triton soft cap of logits."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.registry import implements
from kernels.soft_cap import soft_cap_
from kernels.tiles import cdiv

_BLOCK = 1024


@implements(soft_cap_, "triton")
def launch_soft_cap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Launches a grid of (rows, blocks of columns)."""
    num_rows, width = logits.shape
    if num_rows:
        grid = (num_rows, cdiv(width, _BLOCK))
        _soft_cap_kernel[grid](logits, logits.stride(0), float(cap), WIDTH=width, BLOCK=_BLOCK)
    return logits


@dependent_kernel
def _soft_cap_kernel(x_ptr, x_stride, cap, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    # tanh(x) = 1 - 2 / (exp(2 * x) + 1), which is 1 if exp overflows.
    capped = cap * (1.0 - 2.0 / (tl.exp(2.0 * x / cap) + 1.0))
    tl.store(x_ptr + row * x_stride + column, capped, mask=inside)
