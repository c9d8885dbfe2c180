"""Triton gated norm of a gated delta net: one program per chunk and head, in place."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.gated_delta_rule.base import DeltaLayer
from kernels.states import StateRows
from kernels.tiles import next_power_of_2


def gate_outputs(
    projected: torch.Tensor, layer: DeltaLayer, rows: StateRows, out: torch.Tensor
) -> None:
    """Launches a grid of (chunks, heads): normalizes each head of out [T, H * V] and multiplies it
    by its gate."""
    num_heads, value_dim = len(layer.log_rate), len(layer.norm)
    _gate_kernel[len(rows.piece_rows), num_heads](
        projected, projected.stride(0), layer.norm, out, rows.piece_starts, layer.eps,
        HEADS=num_heads, VALUE=value_dim, CHANNELS=sum(layer.widths[:3]),
        BLOCK_V=next_power_of_2(value_dim),
    )  # fmt: skip


@dependent_kernel(do_not_specialize_on_alignment=["piece_ptr"])
def _gate_kernel(
    x_ptr, x_stride, norm_ptr, out_ptr, piece_ptr, eps,
    HEADS: tl.constexpr, VALUE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr = 16,
):  # fmt: skip
    wait_for_previous_kernel()
    piece, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(piece_ptr + piece), tl.load(piece_ptr + piece + 1)
    value = tl.arange(0, BLOCK_V)[None, :]
    weight = tl.load(norm_ptr + value, mask=value < VALUE, other=0.0).to(tl.float32)
    for start in range(first, end, BLOCK):
        token = (start + tl.arange(0, BLOCK))[:, None]
        inside = (token < end) & (value < VALUE)
        cells = (token * HEADS + head) * VALUE + value
        x = tl.load(out_ptr + cells, mask=inside, other=0.0).to(tl.float32)
        mean_square = tl.sum(x * x, axis=1) / VALUE
        x = (x * (1.0 / tl.sqrt(mean_square + eps))[:, None]).to(out_ptr.dtype.element_ty)
        x = (x.to(tl.float32) * weight).to(out_ptr.dtype.element_ty).to(tl.float32)
        gating = x_ptr + token * x_stride + CHANNELS + head * VALUE + value
        z = tl.load(gating, mask=inside, other=0.0).to(tl.float32)
        gated = x * (z / (1.0 + tl.exp(-z)))
        tl.store(out_ptr + cells, gated.to(out_ptr.dtype.element_ty), mask=inside)
