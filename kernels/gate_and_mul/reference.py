"""Torch reference of gated activations.

They use `exp`, which evaluates all elements alike: torch's sigmoid and gelu may evaluate the end of
a contiguous run with another function than the rest.
"""

from __future__ import annotations

import math

import torch

CUBIC = 0.044715
SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
# Elementwise torch ops on fewer elements than this run on one thread (at::internal::GRAIN_SIZE).
_SERIAL_ELEMENTS = 32768


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Applies SiLU in one call if torch then runs on one thread, else in blocks of rows.

    HAZARD(invariance): torch's silu evaluates the end of a contiguous run with another exp than the
    rest. The gate half is strided, so a run is one row, and all rows end alike. But several threads
    would split the elements in the middle of rows, so calls are kept small enough for one thread.
    """
    gate, up = _wide_halves(x)
    return _silu_of_rows(gate).mul_(up).to(x.dtype)


def _silu_of_rows(gate: torch.Tensor) -> torch.Tensor:
    if gate.is_cuda or gate.numel() < _SERIAL_ELEMENTS or torch.get_num_threads() == 1:
        return torch.nn.functional.silu(gate)
    rows = max(1, (_SERIAL_ELEMENTS - 1) // gate.shape[1])
    out = torch.empty(gate.shape, dtype=gate.dtype)
    for start in range(0, gate.shape[0], rows):
        part = slice(start, start + rows)
        torch.ops.aten.silu.out(gate[part], out=out[part])
    return out


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes gate / (1 + exp(-SLOPE * (gate + CUBIC * gate ** 3))) * up, since (1 + tanh(z)) / 2
    is the sigmoid of 2 * z."""
    gate, up = _wide_halves(x)
    cubic = (gate * gate).mul_(CUBIC).add_(1.0).mul_(gate)
    return gate.div(cubic.mul_(-SLOPE).exp_().add_(1.0)).mul_(up).to(x.dtype)


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Computes (u + 1) * g / (1 + exp(-alpha * g)) of the clamped halves."""
    gate, up = _wide_halves(x)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    decay = (gate * -alpha).exp_().add_(1.0)
    return gate.div_(decay).mul_(up.add_(1.0)).to(x.dtype)


def _wide_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up halves in fp32, as two strided views."""
    half = x.shape[-1] // 2
    wide = x if x.dtype == torch.float32 else x.float()
    return wide[:, :half], wide[:, half:]
