"""Triton gated activations with FP8 outputs: one kernel, compiled for each activation."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from kernels.activate_fp8 import activate_fp8
from kernels.activation.base import Activation
from kernels.dependent_launch import dependent_kernel, wait_for_previous_kernel
from kernels.gate_and_mul.triton_kernel import activated
from kernels.quantize_fp8 import Fp8Rows
from kernels.quantize_fp8.base import BLOCK, empty_rows
from kernels.quantize_fp8.triton_kernel import count_fp8_warps, program_width, store_fp8
from kernels.registry import implements
from kernels.tiles import cdiv


@implements(activate_fp8, "triton")
def launch_activate_fp8(both: torch.Tensor, activation: Activation, *, by_block: bool) -> Fp8Rows:
    """Launches a grid of (rows, blocks of columns); with one scale per row, a row is one block."""
    assert activation.is_gated, "no kernel for activations without a gate"
    rows, features = len(both), both.shape[1] // 2
    out = empty_rows(rows, features, by_block=by_block, device=both.device)
    count, depth = out.codes.shape
    width = program_width(depth, by_block=by_block)
    if rows:
        _activate_fp8_kernel[(count, cdiv(depth, width))](
            both, out.codes, out.scales, rows, count, both.stride(0),
            ACTIVATION=activation.kind, ALPHA=activation.alpha, LIMIT=activation.limit,
            FEATURES=features, DEPTH=depth, GROUP=BLOCK if by_block else width, WIDTH=width,
            num_warps=count_fp8_warps(width),
        )  # fmt: skip
    return out


# Not specialized on the number of rows.
@dependent_kernel(do_not_specialize=["rows", "count"])
def _activate_fp8_kernel(
    x_ptr, code_ptr, scale_ptr, rows, count, x_stride,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    FEATURES: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = (column < FEATURES) & (row < rows)
    gate = tl.load(x_ptr + row * x_stride + column, mask=there, other=0.0)
    up = tl.load(x_ptr + row * x_stride + FEATURES + column, mask=there, other=0.0)
    value = activated(gate.to(tl.float32), up.to(tl.float32), ACTIVATION, ALPHA, LIMIT)
    # Rounded to the type of the input, as if the activation were stored.
    value = value.to(up.dtype).to(tl.float32)
    store_fp8(value, code_ptr, scale_ptr, row, tl.program_id(1), count, DEPTH, GROUP, WIDTH)
