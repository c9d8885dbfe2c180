"""Batch-invariant elementwise functions: an element's result depends, bitwise, only on its value.

HAZARD(invariance): on CPU, torch evaluates the last elements of a contiguous run, fewer than fit in
two vector registers, with different functions than the rest. This affects sigmoid, SiLU, softplus,
GELU, ELU, mish, exp2 and pow, but not exp, expm1, log1p, tanh and erf. A contiguous tensor is one
run, which several threads divide into equal parts. Model code calls the functions of this module,
which divide tensors so that each thread processes only pairs of whole registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

CUBIC = 0.044715
"""Factor of the cubic term in the tanh approximation of GELU."""
SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
"""Slope of the sigmoid that is equivalent to the tanh approximation of GELU: (1 + tanh(z)) / 2 is
the sigmoid of 2 z."""
_RUN_BYTES = 128
"""Bytes of two AVX-512 registers, the widest that torch uses; torch processes two registers at a
time."""
_GRAIN = 32768
"""Number of elements per thread of torch's elementwise ops (at::internal::GRAIN_SIZE)."""
_GELU_GRAIN = 16384
"""Number of elements above which torch's GELU uses all threads (GeluKernelImpl)."""


class _Op(NamedTuple):
    """An elementwise op of torch."""

    function: Callable[..., torch.Tensor]
    """Form of the op that returns a new tensor."""
    into: Callable[..., torch.Tensor]
    """Form of the op that writes into the tensor `out`."""
    is_gelu: bool = False
    is_onednn: bool = False
    """Whether oneDNN computes contiguous tensors; its results differ bitwise from those of torch's
    own kernels, which compute all other tensors."""

    def threads(self, count: int) -> int:
        """Number of threads that torch uses for `count` elements."""
        if self.is_gelu:
            return torch.get_num_threads() if count > _GELU_GRAIN else 1
        return max(min(torch.get_num_threads(), -(-count // _GRAIN)), 1)


_aten = torch.ops.aten
_functional = torch.nn.functional
_SIGMOID = _Op(torch.sigmoid, _aten.sigmoid.out)
_SILU = _Op(_functional.silu, _aten.silu.out)
_SOFTPLUS = _Op(_functional.softplus, _aten.softplus.out)
_GELU = _Op(_functional.gelu, _aten.gelu.out, is_gelu=True, is_onednn=True)
_GELU_TANH = _Op(
    partial(_functional.gelu, approximate="tanh"),
    partial(_aten.gelu.out, approximate="tanh"),
    is_gelu=True,
)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Sigmoid of x [..., N], in the dtype of x."""
    return _apply(_SIGMOID, x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """SiLU of x [..., N], in the dtype of x."""
    return _apply(_SILU, x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Softplus of x [..., N], in the dtype of x."""
    return _apply(_SOFTPLUS, x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU of x [..., N] with the error function, in the dtype of x."""
    return _apply(_GELU, x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU of x [..., N] with the tanh approximation, in the dtype of x."""
    return _apply(_GELU_TANH, x)


def _apply(op: _Op, x: torch.Tensor) -> torch.Tensor:
    """Applies an op to x [..., N] in runs of whole registers."""
    if x.device.type != "cpu":
        return op.function(x)
    width, count, unit = x.shape[-1], x.numel(), _RUN_BYTES // x.itemsize
    if width % unit:
        return _padded(op, x, unit)
    if x.is_contiguous():
        whole = _whole_part(op, count, unit)
        return op.function(x) if whole == count else _in_two(op, x.view(-1), whole).view(x.shape)
    rows = x if x.dim() == 2 else x.reshape(-1, width)
    between, within = rows.stride()
    is_run = within == 1 and between >= width and not op.is_onednn
    if is_run and count % (unit * op.threads(count)) == 0:
        return op.function(rows).view(x.shape)
    return _apply(op, x.contiguous())


def _padded(op: _Op, x: torch.Tensor, unit: int) -> torch.Tensor:
    """Applies an op to a copy of x that is padded to a whole run."""
    count = x.numel()
    length = -(-count // unit) * unit
    while length % (unit * op.threads(length)):
        length += unit
    run = _functional.pad(x.reshape(-1), (0, length - count))
    return op.function(run)[:count].view(x.shape)


def _in_two(op: _Op, x: torch.Tensor, whole: int) -> torch.Tensor:
    """Applies an op to the first `whole` elements of x [N] on all threads, then to the rest."""
    out = torch.empty_like(x)
    op.into(x[:whole], out=out[:whole])
    op.into(x[whole:], out=out[whole:])
    return out


def _whole_part(op: _Op, count: int, unit: int) -> int:
    """Largest number of elements up to `count` that threads divide into multiples of `unit`."""
    while rest := count % (unit * op.threads(count)):
        count -= rest
    return count
