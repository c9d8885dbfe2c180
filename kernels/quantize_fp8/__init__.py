"""Quantization of activations to FP8 (e4m3), for matmuls with FP8 weights."""

from __future__ import annotations

from kernels.quantize_fp8.base import Fp8Inputs, Fp8Rows
from kernels.quantize_fp8.reference import quantize_fp8

__all__ = ["Fp8Inputs", "Fp8Rows", "quantize_fp8"]
