"""Activations of MLPs without a gate that torch computes in several steps; one launch on CUDA."""

from __future__ import annotations

import torch

from kernels.activation import reference
from kernels.registry import registry

_SQUARED_RELU = registry.register(
    "squared_relu",
    reference.squared_relu,
    triton="kernels.activation.triton_kernel:squared_relu",
)
_XIELU = registry.register(
    "xielu", reference.xielu, triton="kernels.activation.triton_kernel:xielu"
)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """The square of each positive element of [T, I], 0 for the others."""
    return _SQUARED_RELU.select(x)(x)


def xielu(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """xIELU (arXiv 2411.13010) of each element of [T, I]: p x² + b x of what is positive, and
    n (exp(min(x, e)) - 1 - x) + b x of the rest; computed in fp32, rounded to x.dtype.

    Args:
        x: inputs.
        numbers: fp32 [4]: p, n, b, e.
    """
    return _XIELU.select(x)(x, numbers)


__all__ = ["squared_relu", "xielu"]
