"""Triton ungated activations: one kernel, compiled for each activation."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.activation import squared_relu, xielu
from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.registry import implements
from kernels.tiles import cdiv

_BLOCK = 1024
_SERIES_FROM = tl.constexpr(-0.25)
"""Minimum x for which exp(x) - 1 is computed as a series of seven terms: close to 0, the difference
would lose precision."""


@implements(squared_relu, "triton")
def launch_squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Launches a grid of (tokens, blocks of columns)."""
    return _activate(x, None)


@implements(xielu, "triton")
def launch_xielu(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Launches a grid of (tokens, blocks of columns)."""
    return _activate(x, numbers)


def _activate(x: torch.Tensor, numbers: torch.Tensor | None) -> torch.Tensor:
    """Launches xIELU if `numbers` is given, otherwise squared ReLU."""
    num_tokens, width = x.shape
    out = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if num_tokens:
        grid = (num_tokens, cdiv(width, _BLOCK))
        _activation_kernel[grid](
            x, out, x if numbers is None else numbers, x.stride(0),
            IS_XIELU=numbers is not None, WIDTH=width, BLOCK=_BLOCK,
        )  # fmt: skip
    return out


@dependent_kernel
def _activation_kernel(
    x_ptr, out_ptr, numbers_ptr, x_stride,
    IS_XIELU: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    stored = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0)
    x = stored.to(tl.float32)
    result = tl.where(x < 0.0, 0.0, x * x)
    if IS_XIELU:
        result = _xielu(x, numbers_ptr)
    tl.store(out_ptr + token * WIDTH + column, result.to(stored.dtype), mask=inside)


@triton.jit
def _xielu(x, numbers_ptr):
    positive = tl.load(numbers_ptr)
    negative = tl.load(numbers_ptr + 1)
    slope = tl.load(numbers_ptr + 2)
    limited = tl.minimum(x, tl.load(numbers_ptr + 3))
    grown = tl.exp(limited) - 1.0
    terms = 1.0 + limited / 7.0
    for order in tl.static_range(6, 1, -1):
        terms = 1.0 + limited / order * terms
    grown = tl.where(limited > _SERIES_FROM, limited * terms, grown)
    return tl.where(x > 0.0, positive * x * x, negative * (grown - x)) + slope * x
