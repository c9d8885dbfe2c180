"""Elementwise functions that are batch invariant: an element's bits depend on its value and its
column, not on other rows.

HAZARD(invariance): on CPU torch evaluates the end of each contiguous run of elements, fewer than a
vector register holds, with other functions than the rest (sigmoid, SiLU, softplus, GELU, ELU, mish,
exp2, pow; not exp, expm1, log1p, tanh, erf). The elements of a contiguous tensor are one run, and
several threads cut it anywhere. Model code takes these functions from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

CUBIC = 0.044715
"""Factor of the cubic term of GELU by tanh."""
SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
"""Slope of the sigmoid that GELU by tanh is: (1 + tanh(z)) / 2 is the sigmoid of 2 z."""
_SERIAL_ELEMENTS = 32768
"""Elements from which on torch's elementwise ops use several threads (at::internal::GRAIN_SIZE)."""
_WHOLE = 256
"""Elements that fill whole registers, however many torch computes at a time: two of AVX-512 hold 64
of bf16."""
_GAP = 16
"""Elements between rows that would else be one run: a cache line of fp32."""


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Sigmoid of x [..., N], in the type of x."""
    return _by_rows(x, torch.sigmoid, torch.ops.aten.sigmoid.out)


def silu(x: torch.Tensor) -> torch.Tensor:
    """SiLU of x [..., N], in the type of x."""
    return _by_rows(x, torch.nn.functional.silu, torch.ops.aten.silu.out)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Softplus of x [..., N], in the type of x."""
    return _by_rows(x, torch.nn.functional.softplus, torch.ops.aten.softplus.out)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU of x by the error function, computed in fp32 on CPU, in the type of x."""
    if x.device.type != "cpu":
        return torch.nn.functional.gelu(x)
    wide = x.float()
    share = (wide * math.sqrt(0.5)).erf_().add_(1.0).mul_(0.5)
    return share.mul_(wide).to(x.dtype)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU of x by its tanh approximation, computed in fp32 on CPU, in the type of x."""
    if x.device.type != "cpu":
        return torch.nn.functional.gelu(x, approximate="tanh")
    return wide_gelu_tanh(x.float()).to(x.dtype)


def wide_gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-SLOPE * (x + CUBIC * x ** 3))) of x fp32, on any device."""
    cubic = (x * x).mul_(CUBIC).add_(1.0).mul_(x)
    return x.div(cubic.mul_(-SLOPE).exp_().add_(1.0))


def _by_rows(
    x: torch.Tensor, function: Callable[..., torch.Tensor], into: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Applies a function so that all rows end alike: in runs of one row, or of rows that end with
    whole registers.

    Calls are kept small enough for one thread: several would cut runs in the middle of rows.

    Args:
        x: [..., N].
        function: the function of a tensor.
        into: the same function, which writes into the tensor `out`.
    """
    if x.device.type != "cpu":
        return function(x)
    width = x.shape[-1]
    is_serial = x.numel() < _SERIAL_ELEMENTS or torch.get_num_threads() == 1
    if is_serial and x.is_contiguous() and (width % _WHOLE == 0 or x.numel() == width):
        return function(x)
    rows = x if x.dim() == 2 else x.reshape(-1, width)
    count, (between, within) = rows.shape[0], rows.stride()
    if within != 1:
        rows, between = rows.contiguous(), width
    if is_serial and between > width > 1:
        return function(rows).view(x.shape)
    out = torch.empty_strided((count, width), (width + _GAP, 1), dtype=x.dtype)
    step = max(count, 1) if is_serial else max((_SERIAL_ELEMENTS - 1) // width, 1)
    for start in range(0, count, step):
        into(rows[start : start + step], out=out[start : start + step])
    return out.view(x.shape)
