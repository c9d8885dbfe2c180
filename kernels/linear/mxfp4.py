"""MXFP4: 4-bit floats (e2m1), of which 32 share a power of two."""

from __future__ import annotations

import torch

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def dequantize_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype
) -> torch.Tensor:
    """The weights in `dtype`, [..., 32 * B].

    Args:
        blocks: uint8 [..., B, 16], two values each, of which the first is in the low bits; the
            highest bit of a value is its sign.
        scales: uint8 [..., B], exponents of two plus 127.
        dtype: of the result.
    """
    table = torch.tensor(_VALUES + tuple(-value for value in _VALUES), device=blocks.device)
    bits = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponents = (scales.int() - _BIAS).unsqueeze(-1)
    return torch.ldexp(table[bits.int()], exponents).to(dtype).flatten(-2)
