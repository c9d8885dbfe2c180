"""Gated activations with outputs quantized to FP8 for the next matmul, in one launch on CUDA."""

from __future__ import annotations

import torch

from kernels.activation.base import Activation
from kernels.quantize_fp8 import Fp8Rows, quantize_fp8
from kernels.registry import op


@op
def activate_fp8(both: torch.Tensor, activation: Activation, *, by_block: bool) -> Fp8Rows:
    """Applies a gated activation, rounds the result to the dtype of its input, and quantizes it as
    `quantize_fp8` does.

    Args:
        both: [T, 2 * I]: outputs of the gate projection, then of the up projection.
        activation: gated activation.
        by_block: whether each block of 128 features has a scale, rather than each row.
    """
    assert activation.is_gated, "no kernel for activations without a gate"
    return quantize_fp8(activation(both), by_block=by_block)


__all__ = ["activate_fp8"]
