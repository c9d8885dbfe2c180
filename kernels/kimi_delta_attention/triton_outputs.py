"""Triton gated norm of Kimi Delta Attention: one program per chunk and head, in place."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.kimi_delta_attention.base import KimiDeltaLayer
from kernels.states import StateRows
from kernels.tiles import next_power_of_2


def gate_outputs(
    gates: torch.Tensor, layer: KimiDeltaLayer, rows: StateRows, out: torch.Tensor
) -> None:
    """Launches a grid of (chunks, heads): normalizes each head of out [T, H * V] and multiplies it
    by the sigmoid of its gates [T, H * V]."""
    num_heads, value_dim = len(layer.log_rate), len(layer.norm)
    _gate_by_sigmoid_kernel[len(rows.piece_rows), num_heads](
        gates, gates.stride(0), layer.norm, out, rows.piece_starts, layer.eps,
        HEADS=num_heads, VALUE=value_dim, BLOCK_V=next_power_of_2(value_dim),
    )  # fmt: skip


@dependent_kernel(do_not_specialize_on_alignment=["piece_ptr"])
def _gate_by_sigmoid_kernel(
    gate_ptr, gate_stride, norm_ptr, out_ptr, piece_ptr, eps,
    HEADS: tl.constexpr, VALUE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr = 16,
):  # fmt: skip
    wait_for_previous_kernel()
    piece, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(piece_ptr + piece), tl.load(piece_ptr + piece + 1)
    value = tl.arange(0, BLOCK_V)[None, :]
    weight = tl.load(norm_ptr + value, mask=value < VALUE, other=0.0)
    for start in range(first, end, BLOCK):
        token = (start + tl.arange(0, BLOCK))[:, None]
        inside = (token < end) & (value < VALUE)
        cells = out_ptr + (token * HEADS + head) * VALUE + value
        x = tl.load(cells, mask=inside, other=0.0).to(tl.float32)
        mean_square = tl.sum(x * x, axis=1) / VALUE
        x = x * (1.0 / tl.sqrt(mean_square + eps))[:, None] * weight
        gates = gate_ptr + token * gate_stride + head * VALUE + value
        gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
        x = x * (1.0 / (1.0 + tl.exp(-gate)))
        tl.store(cells, x.to(out_ptr.dtype.element_ty), mask=inside)
