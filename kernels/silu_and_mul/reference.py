"""Torch SiLU-and-multiply."""

from __future__ import annotations

import torch

# Elementwise torch ops on fewer elements than this run on one thread (at::internal::GRAIN_SIZE).
_SERIAL_ELEMENTS = 32768


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Take SiLU row by row: one call where torch does so by itself, else blocks of rows.

    HAZARD(invariance): torch's silu evaluates the end of a contiguous run with another exp than
    its body. The gate half is strided, so a run is one row, and every row ends alike; but several
    threads would share the elements out in the middle of rows. Small calls stay on one thread.
    """
    half = x.shape[-1] // 2
    wide = x if x.dtype == torch.float32 else x.float()
    gate, up = wide[:, :half], wide[:, half:]
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
