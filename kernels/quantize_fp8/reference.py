"""Torch reference of the quantization of rows to FP8."""

from __future__ import annotations

import torch

from kernels.quantize_fp8.base import (
    BLOCK,
    LARGEST,
    LEAST_MAXIMUM,
    Fp8Rows,
    empty_rows,
    padded_depth,
    padded_rows,
)
from kernels.registry import op


@op
def quantize_fp8(x: torch.Tensor, *, by_block: bool) -> Fp8Rows:
    """Quantizes rows [T, K] to e4m3, in fp32, with scales that map the largest magnitude to 448.

    Args:
        x: [T, K].
        by_block: whether each block of 128 features has a scale, rather than each row.
    """
    rows, depth = x.shape
    values = x.new_zeros(padded_rows(rows), padded_depth(depth), dtype=torch.float32)
    values[:rows, :depth] = x
    groups = values.unflatten(1, (-1, BLOCK)) if by_block else values.unsqueeze(1)
    scales = groups.abs().amax(dim=-1).clamp_(min=LEAST_MAXIMUM) / LARGEST
    codes = groups * (1.0 / scales).unsqueeze(-1)
    quads = codes.reshape(len(values), -1, 2, 2).transpose(2, 3)
    codes = quads.reshape(values.shape).to(torch.float8_e4m3fn)
    out = empty_rows(rows, depth, by_block=by_block, device=x.device)
    out.codes.copy_(codes)
    out.scales.copy_(scales)
    return out
